"""`tllm plan JOB.toml` of a student: which machines should teach and which train, and the commands that start both."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

import msgspec

from tllm.cli.display.tables import amount, table
from tllm.cli.display.training_plans import not_timed
from tllm.cli.planning.plan_chooser import TrainingChooser
from tllm.core.errors import ConfigError
from tllm.planner.cluster.device import Cluster
from tllm.planner.memory.role_memory import teacher_bytes
from tllm.planner.roles.teacher_machines import Taught, TaughtChoice, taught_choices
from tllm.planner.search.training_search import TrainingChoice
from tllm.training.job.job import Job

PORT = 7070
"""Where a teacher is to be reached, in the commands that are shown."""


def show_taught(args: argparse.Namespace, cluster: Cluster, chooser: TrainingChooser) -> None:
    """Print the best choices, and how to start the first."""
    job, facts = chooser.resolved.job, chooser.facts()
    assert job.distill is not None and facts.teacher is not None, "a student whose teacher is known"
    taught = Taught(facts.teacher, answer_bytes(job, facts.teacher.spec.vocab_size), job.distill.lmbda)

    def best(part: Cluster, is_beside: bool) -> TrainingChoice:
        return chooser.best(part, beside=is_beside).choices[0]

    found = taught_choices(cluster, taught, best, named_devices(cluster, job.distill.teacher_nodes))
    steps = commands(args, cluster, job, found[0])
    if args.json:
        told = {"goal": "train", "choices": [_as_json(cluster, one) for one in found[: args.top]], "commands": steps}
        print(msgspec.json.format(msgspec.json.encode(told)).decode())
        return
    lines = [
        f"a step of {facts.global_batch_size} rows of {facts.seq_len} tokens; the teacher takes "
        f"{amount(teacher_bytes(facts.teacher))} where it is",
        "",
        table(_rows(cluster, found[: args.top])),
        "",
        *not_timed(facts, found[0].student.predicted),
        "to start the first:",
        *(f"  on {name}: {command}" for name, command in steps),
        *notes(cluster, job, found[0]),
    ]
    print("\n".join(lines))


def named_devices(cluster: Cluster, names: Sequence[str]) -> tuple[int, ...] | None:
    """The devices of machines that a job names; None where it names none. ConfigError for names that cannot be."""
    if not names:
        return None
    unknown = [name for name in names if name not in cluster.names]
    if unknown:
        raise ConfigError(
            f"distill.teacher_nodes names {unknown[0]!r}, and the cluster has {', '.join(cluster.names)}",
            "give the names of machines of the cluster",
        )
    devices = tuple(d for d in range(len(cluster)) if cluster.names[cluster.node_of[d]] in names)
    if 0 in devices:
        raise ConfigError(
            f"distill.teacher_nodes names {cluster.name(0)}, the first machine, which has the data and trains",
            "leave it out: a teacher beside the student is one of the choices where teacher_nodes is left out",
        )
    return devices


def answer_bytes(job: Job, vocab_size: int) -> float:
    """Bytes at most of what a teacher says of a row: the likeliest tokens of each place, and all others together."""
    assert job.distill is not None, "a student has a teacher"
    top_k, item = job.distill.top_k, 2 if vocab_size <= 2**16 else 4
    return job.seq_len * (top_k * (item + 4) + 4 if top_k else 4 * vocab_size)


def commands(args: argparse.Namespace, cluster: Cluster, job: Job, choice: TaughtChoice) -> list[tuple[str, str]]:
    """What to start on which machine, in order: (machine, command). Machines are reached by their names."""
    assert job.distill is not None and job.distill.teacher_model_name_or_path, "a teacher by its name"
    placed, first = choice.student.placed, cluster.name(choice.policy[0])
    found, addresses = list[tuple[str, str]](), list[str]()
    for place, device in enumerate(choice.teachers):
        port = PORT + sum(cluster.node_of[other] == cluster.node_of[device] for other in choice.teachers[:place])
        teach = ["tllm", "teach", job.distill.teacher_model_name_or_path, "--host", "0.0.0.0", "--port", str(port)]
        teach += ["--secret", job.distill.teacher_secret, "--dtype", job.distill.teacher_dtype]
        found.append((cluster.name(device), shlex.join(teach)))
        addresses.append(f"{cluster.names[cluster.node_of[device]]}:{port}")
    train = ["tllm", "train", args.model, *(word for one in args.set for word in ("--set", one))]
    train += ["--set", f"microbatch_size={placed.facts.microbatch_size}", "--plan", str(placed.plan)]
    if len(choice.policy) > 1:
        train += ["--nodes", str(len(choice.policy))]
    if addresses:
        train += ["--set", "distill.teacher_model_name_or_path=none"]
        train += ["--set", f"distill.teachers={','.join(addresses)}"]
    found.append((first, shlex.join(train)))
    return found


def notes(cluster: Cluster, job: Job, choice: TaughtChoice) -> list[str]:
    """What is to be done beside the commands."""
    assert job.distill is not None, "a student has a teacher"
    names, others = [cluster.name(device) for device in choice.teachers], choice.policy[1:]
    found = []
    if names:
        to = ", ".join([*names[1:], cluster.name(choice.policy[0])])
        found.append(f"{job.distill.teacher_secret} is written on {names[0]} where it is not there: copy it to {to}")
    if others:
        joining = ", ".join(cluster.name(device) for device in others)
        found.append(f"the line `tllm join …` that the last command prints is for {joining}")
    return found


def _rows(cluster: Cluster, choices: Sequence[TaughtChoice]) -> list[list[str]]:
    rows = [["", "teachers", "policy", "plan", "s/step", "teaching s", "policy s", "most memory"]]
    for number, one in enumerate(choices, 1):
        teachers = " ".join(map(cluster.name, one.teachers)) or f"beside the student on {cluster.name(one.policy[0])}"
        rows.append(
            [
                str(number),
                teachers,
                " ".join(map(cluster.name, one.policy)),
                str(one.student.placed.plan),
                f"{one.seconds:.4g}",
                f"{one.teaching:.4g}",
                f"{one.student.predicted.policy:.4g}",
                amount(max(rank.total for rank in one.student.memory)),
            ]
        )
    return rows


def _as_json(cluster: Cluster, one: TaughtChoice) -> dict[str, Any]:
    return {
        "teachers": [cluster.name(device) for device in one.teachers],
        "nodes": [cluster.name(device) for device in one.policy],
        "plan": str(one.student.placed.plan),
        "microbatch_size": one.student.placed.facts.microbatch_size,
        "seconds": one.seconds,
        "teaching": one.teaching,
        "policy": one.student.predicted.policy,
    }
