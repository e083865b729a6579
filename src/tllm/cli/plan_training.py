"""The best training plans for a cluster, as text and as JSON."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import msgspec

from tllm.cli.plan_serving import certainty, given_plan
from tllm.cli.tables import amount, table
from tllm.cli.timeline import as_svg, as_text
from tllm.cli.training_plan import KINDS
from tllm.planner.cluster import Cluster
from tllm.planner.explain import stage_names, step_accounts, step_lines, training_bottleneck
from tllm.planner.placed import Placed
from tllm.planner.ranks import TrainingFacts
from tllm.planner.search_training import TrainingChoice, TrainingFound, best_training
from tllm.spec.model import ModelSpec


def show_training(args: argparse.Namespace, spec: ModelSpec, cluster: Cluster) -> None:
    """Choose, or take the plan that is given, and print what it comes to."""
    facts = TrainingFacts(args.seq, args.batch, dtype=args.dtype or spec.dtype)
    found = _given(args.plan, spec, cluster, facts) if args.plan else best_training(spec, cluster, facts, args.top)
    best = found.choices[0]
    names = stage_names(best.placed.plan, cluster, best.placed.devices)
    lines = step_lines(best.predicted.timeline, names) if best.predicted.timeline else []
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(_as_json(cluster, found))).decode())
    else:
        print("\n".join(_as_text(cluster, found, is_given=bool(args.plan))))
        if args.explain:
            print("\n".join(_explained(best, names)), as_text(lines), sep="\n")
    if args.svg is not None:
        args.svg.write_text(as_svg(lines, f"{best.placed.plan}: one step"))


def _given(text: str, spec: ModelSpec, cluster: Cluster, facts: TrainingFacts) -> TrainingFound:
    """The plan on the cluster's devices, in their order."""
    plan = given_plan(text, spec, cluster)
    placed = Placed(spec, plan, facts, cluster, tuple(range(plan.world_size)))
    return TrainingFound((TrainingChoice(placed, placed.predict(), tuple(placed.memory(placed.replicas))),), True, 1)


def _as_text(cluster: Cluster, found: TrainingFound, is_given: bool) -> list[str]:
    rows = [["", "plan", "microbatch", "nodes", "s/step", "tokens/s", "MFU", "bubble", "most memory"]]
    for number, choice in enumerate(found.choices, 1):
        placed, predicted = choice.placed, choice.predicted
        rows.append(
            [
                str(number),
                str(placed.plan),
                str(placed.facts.microbatch_size),
                _nodes(choice),
                f"{predicted.seconds:.4g}",
                f"{predicted.tokens_per_second:,.0f}",
                f"{100 * placed.mfu(predicted.seconds):.1f} %",
                f"{100 * predicted.bubble:.0f} %",
                amount(max(one.total for one in choice.memory)),
            ]
        )
    best = found.choices[0]
    facts = best.placed.facts
    how = "as given" if is_given else certainty(found.exact, found.steps)
    return [
        f"a step of {facts.global_batch_size} rows of {facts.seq_len} tokens, {facts.dtype}; {how}",
        "",
        table(rows),
        "",
        f"the time goes to {training_bottleneck(best.predicted)}",
        *left_out(cluster, best),
        "",
        table(_ranks(cluster, best)),
    ]


def _nodes(choice: TrainingChoice) -> str:
    """The nodes in the order of ranks, many of them by their number."""
    devices, cluster = choice.placed.devices, choice.placed.cluster
    return " ".join(map(cluster.name, devices)) if len(devices) <= 8 else f"{len(devices)} devices"


def left_out(cluster: Cluster, best: TrainingChoice) -> list[str]:
    used = set(best.placed.devices)
    unused = [cluster.name(device) for device in range(len(cluster)) if device not in used]
    if not unused:
        return []
    if len(used) == 1:
        return [f"{cluster.name(best.placed.devices[0])} alone is faster than with others"]
    return [f"left out, as they would slow it down or add nothing: {', '.join(unused)}"]


def _ranks(cluster: Cluster, choice: TrainingChoice) -> list[list[str]]:
    """A line for each rank of the replicas that stand for all: memory by kind, bytes sent by group."""
    shown = [kind for kind in KINDS if any(getattr(one, kind) for one in choice.memory)]
    sent = choice.predicted.bytes_sent
    groups = [name for name in asdict(sent[0]) if any(getattr(one, name) for one in sent)]
    titles = [kind.replace("_", " ") for kind in shown]
    rows = [["rank", "node", *titles, "sum", "of", *(f"{group} sent" for group in groups)]]
    for memory, traffic in zip(choice.memory, sent, strict=True):
        device = choice.placed.devices[memory.rank]
        bytes_of = [amount(getattr(memory, kind)) for kind in shown]
        has = [amount(memory.total), amount(cluster.devices[device].memory)]
        of_groups = [amount(getattr(traffic, group)) for group in groups]
        rows.append([str(memory.rank), cluster.name(device), *bytes_of, *has, *of_groups])
    return rows


def _explained(choice: TrainingChoice, names: list[str]) -> list[str]:
    rows = [["stage", "nodes", "busy", "waiting", "gradients", "sum"]]
    for number, (name, *seconds) in enumerate(step_accounts(choice.predicted, names)):
        rows.append([str(number), name, *(f"{part:.4f}" for part in (*seconds, sum(seconds)))])
    found = choice.predicted
    busiest = f"products {found.compute:.4f}, sums and exchanges inside layers {found.layers:.4f}"
    return ["", "where a step's time goes, s:", table(rows), f"of the busiest stage: {busiest}", ""]


def _as_json(cluster: Cluster, found: TrainingFound) -> dict[str, Any]:
    return {
        "goal": "train",
        "exact": found.exact,
        "steps": found.steps,
        "choices": [_choice_json(cluster, choice) for choice in found.choices],
    }


def _choice_json(cluster: Cluster, choice: TrainingChoice) -> dict[str, Any]:
    placed, predicted = choice.placed, choice.predicted
    return {
        "plan": str(placed.plan),
        "microbatch_size": placed.facts.microbatch_size,
        "nodes": [cluster.name(device) for device in placed.devices],
        "seconds": predicted.seconds,
        "compute": predicted.compute,
        "layers": predicted.layers,
        "pipeline": predicted.pipeline,
        "gradients": predicted.gradients,
        "tokens_per_second": predicted.tokens_per_second,
        "mfu": placed.mfu(predicted.seconds),
        "bubble": predicted.bubble,
        "bottleneck": training_bottleneck(predicted),
        "memory": [asdict(one) | {"total": one.total} for one in choice.memory],
        "bytes_sent": [asdict(one) for one in predicted.bytes_sent],
    }
