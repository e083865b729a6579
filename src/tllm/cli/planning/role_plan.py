"""`tllm plan JOB.toml` of a job with roles: which machines should have them and which train, and how to start that."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from tllm.cli.display.tables import indented_json, table
from tllm.cli.display.training_plans import not_predicted, not_timed
from tllm.cli.planning.plan_chooser import TrainingChooser
from tllm.core.errors import counted
from tllm.core.memory import amount
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import JudgeFacts
from tllm.planner.roles.role_machines import ANY, RoleChoice, RoleWish
from tllm.spec.process_groups import RoleName
from tllm.training.job.job_parts import role_key, role_nodes, role_plan_text
from tllm.training.job.key_limits import ALONE, AUTO


def has_roles(chooser: TrainingChooser) -> bool:
    """Whether others than the ranks may do what the job asks for: where it says so, or names a model that judges."""
    facts = chooser.facts(apart=())
    return bool(role_nodes(chooser.resolved.job)) or facts.teacher is not None or facts.reward is not None


def show_roles(args: argparse.Namespace, cluster: Cluster, chooser: TrainingChooser) -> None:
    """Print the best choices, and how to start the first."""
    facts = chooser.facts(apart=())
    judges: dict[RoleName, JudgeFacts | None] = {"teacher": facts.teacher, "reward": facts.reward}
    others: dict[RoleName, RoleWish] = {role: ANY for role, judge in judges.items() if judge is not None}
    found = chooser.best_with_roles(cluster, others=others)
    asked = [*others, *(role for role in role_nodes(chooser.resolved.job) if role not in others)]
    steps = commands(args, cluster, chooser, asked, found[0])
    if args.json:
        told = {"goal": "train", "choices": [_as_json(cluster, one) for one in found[: args.top]], "commands": steps}
        print(indented_json(told))
        return
    does = {"teacher": "that teaches", "rollout": "that samples", "reward": "that scores"}
    takes = [
        f"a machine {does[role]} holds {amount(nbytes)}" for role, nbytes in found[0].held.items() if role in asked
    ]
    lines = [
        f"a step of {counted(facts.global_batch_size, 'row')} of {counted(facts.seq_len, 'token')}; {', '.join(takes)}",
        "",
        table(_rows(cluster, found[: args.top], asked)),
        "",
        *not_timed(found[0].training.placed.facts, found[0].training.predicted),
        *not_predicted(chooser.resolved.job),
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
            plan = str(choice.plans.get(role, ALONE))
            if plan != role_plan_text(job, role) and (plan == ALONE or role_plan_text(job, role) == AUTO):
                train += ["--set", f"{job.task}.{role}_plan={plan}"]
    if joining:
        train += ["--nodes", str(1 + len(joining))]
    join = [(name, shlex.join(["tllm", "join", "HOST:PORT", "--token", "TOKEN", "--name", name])) for name in joining]
    return [(cluster.name(choice.policy[0]), shlex.join(train)), *join]


def _rows(cluster: Cluster, choices: Sequence[RoleChoice], asked: Sequence[RoleName]) -> list[list[str]]:
    titles = ["", *(["teachers"] if "teacher" in asked else []), *(["rollout"] if "rollout" in asked else [])]
    titles += ["reward"] if "reward" in asked else []
    parts = [*(["teaching s"] if "teacher" in asked else []), *(["sampling s"] if "rollout" in asked else [])]
    parts += ["scoring s"] if "reward" in asked else []
    rows = [[*titles, "policy", "plan", "s/step", *parts, "policy s", "most memory"]]
    for number, one in enumerate(choices, 1):
        predicted, first = one.training.predicted, cluster.name(one.policy[0])
        who = {"teacher": f"beside the student on {first}", "rollout": "the policy's"}
        who["reward"] = f"beside the policy on {first}"
        for role, devices in one.by_role.items():
            by = f" by {one.plans[role]}" if role in one.plans else ""
            who[role] = " ".join(map(cluster.name, devices)) + by if devices else who[role]
        seconds = one.seconds_by_role
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
        "plans": {role: str(plan) for role, plan in one.plans.items()},
        "microbatch_size": one.training.placed.facts.microbatch_size,
        "seconds": one.seconds,
        "teaching": one.teaching,
        "sampling": dict(predicted.roles).get("sampling", 0.0),
        "scoring": dict(predicted.roles).get("rewards", 0.0),
        "policy": predicted.policy,
        "memory": {**one.held, "policy": max(rank.total for rank in one.training.memory)},
    }
