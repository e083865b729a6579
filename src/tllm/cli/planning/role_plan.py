"""`tllm plan JOB.toml` of a job with roles: which machines should have them and which train, and how to start that."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

import msgspec

from tllm.cli.display.tables import amount, table
from tllm.cli.display.training_plans import not_timed
from tllm.cli.planning.plan_chooser import TrainingChooser
from tllm.planner.cluster.device import Cluster
from tllm.planner.memory.role_memory import rollout_bytes, teacher_bytes
from tllm.planner.roles.role_machines import ANY, RoleChoice
from tllm.spec.process_groups import RoleName
from tllm.training.job.job_parts import role_key, role_nodes


def has_roles(chooser: TrainingChooser) -> bool:
    """Whether others than the ranks may do what the job asks for: where it says so, or names the teacher's model."""
    return bool(role_nodes(chooser.resolved.job)) or chooser.facts(apart=()).teacher is not None


def show_roles(args: argparse.Namespace, cluster: Cluster, chooser: TrainingChooser) -> None:
    """Print the best choices, and how to start the first."""
    facts = chooser.facts(apart=())
    others: dict[RoleName, Any] = {"teacher": ANY} if facts.teacher is not None else {}
    found = chooser.best_with_roles(cluster, others=others)
    asked = [*others, *(role for role in role_nodes(chooser.resolved.job) if role not in others)]
    steps = commands(args, cluster, chooser, asked, found[0])
    if args.json:
        told = {"goal": "train", "choices": [_as_json(cluster, one) for one in found[: args.top]], "commands": steps}
        print(msgspec.json.format(msgspec.json.encode(told)).decode())
        return
    takes = []
    if facts.teacher is not None:
        takes.append(f"the teacher takes {amount(teacher_bytes(facts.teacher))} where it is")
    if "rollout" in asked:
        takes.append(f"a machine that samples {amount(rollout_bytes(chooser.spec, facts))}")
    if "reward" in asked:
        takes.append("what a machine that scores takes is not predicted")
    lines = [
        f"a step of {facts.global_batch_size} rows of {facts.seq_len} tokens; {', '.join(takes)}",
        "",
        table(_rows(cluster, found[: args.top], asked)),
        "",
        *not_timed(found[0].training.placed.facts, found[0].training.predicted),
        "to start the first:",
        *(f"  on {name}: {command}" for name, command in steps),
    ]
    if len(steps) > 1:
        lines.append("with the address and the token that the first command prints in the place of HOST:PORT and TOKEN")
    print("\n".join(lines))


def commands(
    args: argparse.Namespace, cluster: Cluster, chooser: TrainingChooser, asked: Sequence[RoleName], choice: RoleChoice
) -> list[tuple[str, str]]:
    """What to start on which machine, in order: (machine, command)."""
    placed, job = choice.training.placed, chooser.resolved.job
    train = ["tllm", "train", args.model, *(word for one in args.set for word in ("--set", one))]
    train += ["--set", f"microbatch_size={placed.facts.microbatch_size}", "--plan", str(placed.plan)]
    apart = (*choice.rollouts, *choice.teachers, *choice.rewards)
    joining = [cluster.name(device) for device in (*choice.policy, *apart)[1:]]
    for role, devices in choice.by_role.items():
        if role in asked and (devices or role in role_nodes(job)):
            names = ",".join(cluster.name(device) for device in devices)
            train += ["--set", f"{role_key(job, role)}={names or '[]'}"]
    if joining:
        train += ["--nodes", str(1 + len(joining))]
    join = [(name, shlex.join(["tllm", "join", "HOST:PORT", "--token", "TOKEN", "--name", name])) for name in joining]
    return [(cluster.name(choice.policy[0]), shlex.join(train)), *join]


def _rows(cluster: Cluster, choices: Sequence[RoleChoice], asked: Sequence[RoleName]) -> list[list[str]]:
    titles = ["", *(["teachers"] if "teacher" in asked else []), *(["rollout"] if "rollout" in asked else [])]
    titles += ["reward"] if "reward" in asked else []
    parts = [*(["teaching s"] if "teacher" in asked else []), *(["sampling s"] if "rollout" in asked else [])]
    rows = [[*titles, "policy", "plan", "s/step", *parts, "policy s", "most memory"]]
    for number, one in enumerate(choices, 1):
        predicted, first = one.training.predicted, cluster.name(one.policy[0])
        who = {
            "teacher": " ".join(map(cluster.name, one.teachers)) or f"beside the student on {first}",
            "rollout": " ".join(map(cluster.name, one.rollouts)) or "the policy's",
            "reward": " ".join(map(cluster.name, one.rewards)),
        }
        seconds = {"teacher": one.teaching, "rollout": dict(predicted.roles).get("sampling", 0.0)}
        rows.append(
            [
                str(number),
                *(who[role] for role in who if role in asked),
                " ".join(map(cluster.name, one.policy)),
                str(one.training.placed.plan),
                f"{one.seconds:.4g}",
                *(f"{seconds[role]:.4g}" for role in seconds if role in asked),
                f"{predicted.policy:.4g}",
                amount(max(rank.total for rank in one.training.memory)),
            ]
        )
    return rows


def _as_json(cluster: Cluster, one: RoleChoice) -> dict[str, Any]:
    predicted = one.training.predicted
    return {
        "teachers": [cluster.name(device) for device in one.teachers],
        "rollouts": [cluster.name(device) for device in one.rollouts],
        "rewards": [cluster.name(device) for device in one.rewards],
        "nodes": [cluster.name(device) for device in one.policy],
        "plan": str(one.training.placed.plan),
        "microbatch_size": one.training.placed.facts.microbatch_size,
        "seconds": one.seconds,
        "teaching": one.teaching,
        "sampling": dict(predicted.roles).get("sampling", 0.0),
        "policy": predicted.policy,
    }
