"""Prints a simulated training step: how long it takes, where each shown rank's time goes, and what failures cost."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from tllm.cli.display.serving_plans import given_plan
from tllm.cli.display.tables import brief, indented_json, span, table
from tllm.cli.display.timeline import as_text, save_svg
from tllm.core.errors import ConfigError, counted
from tllm.core.memory import amount
from tllm.planner.cluster.device import Cluster
from tllm.planner.cluster.failures import Failures
from tllm.planner.cluster.quantity import SECONDS, positive
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.search.large_cluster_search import best_even_plan
from tllm.planner.search.training_layouts import MOST_DEVICES
from tllm.planner.search.training_search import best_training
from tllm.planner.simulate.explain import StageTimeline, TimelineBar, training_bottleneck
from tllm.planner.simulate.large_cluster import ClusterStep, RankTime, device_order, play_ranks
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Coordinates, Plan
from tllm.spec.process_groups import computing

HOUR = 3600


@dataclass(frozen=True)
class FailureEstimate:
    """What failures cost a long run (`planner.cluster.failures`)."""

    nodes: int
    between: float
    """Mean seconds between two failures of any node."""
    best: float
    """The interval between saves, in seconds, with the largest useful share."""
    interval: float
    """The interval that is asked for, or the best one."""
    useful: float
    """The share of the time that is work which lasts."""


def show_step(args: argparse.Namespace, spec: ModelSpec, cluster: Cluster) -> None:
    """Simulate the plan that is given, or the best one, and print the result."""
    placed = _placed(args, spec, cluster)
    played = play_ranks(placed)
    ranks = _ranks(args.rank, placed.plan)
    failures = _failure_estimate(cluster.failures, placed, args.save_every)
    lines = [_line(played, rank) for rank in ranks]
    if args.json:
        print(indented_json(_as_json(played, ranks, failures)))
    else:
        print("\n".join([*_as_text(played, ranks), *_failure_lines(played, failures), "", as_text(lines)]))
    if args.svg is not None:
        save_svg(args.svg, lines, f"{brief(placed.plan)}: one step of {played.ranks:,} ranks")


def _placed(args: argparse.Namespace, spec: ModelSpec, cluster: Cluster) -> PlacedPlan:
    """The plan on the cluster's devices; without one, the best that a search finds."""
    dtype = args.dtype or spec.dtype
    facts = TrainingFacts(args.seq, args.batch, args.microbatch, dtype)
    if args.plan is None and len(cluster) > MOST_DEVICES:
        return best_even_plan(spec, cluster, facts, args.products)
    if args.plan is None:
        found = best_training(spec, cluster, facts).choices[0].placed
        return PlacedPlan(spec, found.plan, found.facts, cluster, found.devices, args.products, cluster.execution)
    plan = given_plan(args.plan, spec, cluster)
    return PlacedPlan(spec, plan, facts, cluster, device_order(plan, args.order), args.products, cluster.execution)


def _ranks(given: list[int] | None, plan: Plan) -> list[int]:
    ranks = given or [plan.rank_of(Coordinates(0, stage, 0, 0)) for stage in range(plan.pp)]
    wrong = next((rank for rank in ranks if rank not in computing(plan)), None)
    if wrong is not None:
        raise ConfigError(f"--rank {wrong} computes nothing in plan {plan}", f"it has ranks 0 to {computing(plan)[-1]}")
    return ranks


def _failure_estimate(given: Failures | None, placed: PlacedPlan, every: str | None) -> FailureEstimate | None:
    if given is None:
        if every is not None:
            raise ConfigError("--save-every is given and the cluster has no [failures]", "add it to the cluster file")
        return None
    nodes = len({placed.cluster.node_of[device] for device in placed.devices})
    best = given.best(nodes)
    interval = best if every is None else positive(every, SECONDS, "--save-every")
    return FailureEstimate(nodes, given.mean(nodes), best, interval, given.useful(nodes, interval))


def _line(played: ClusterStep, rank: int) -> StageTimeline:
    bars = [TimelineBar(span.start, span.stop, str(span.op), span.op.kind) for span in played.spans(rank)]
    end = played.prediction.seconds
    gradients = played.time(rank).gradients
    if gradients:
        bars.append(TimelineBar(end - gradients, end, "sums of gradients, gathers of weights", "sums"))
    return StageTimeline(f"rank {rank}", tuple(bars))


def _as_text(played: ClusterStep, ranks: list[int]) -> list[str]:
    placed, found = played.placed, played.prediction
    plan, facts, cluster = placed.plan, placed.facts, placed.cluster
    products = f", products in {placed.product_dtype}" if placed.product_dtype else ""
    each = found.tokens_per_second / played.ranks
    rows = [["rank", "stage", "layers", *(name for name in RankTime._fields), "sum"]]
    for rank in ranks:
        stage, time = plan.coordinates(rank).stage, played.time(rank)
        layers = " ".join(span(run.start, run.stop) for run in plan.runs[stage :: plan.pp][:3])
        more = " …" if plan.chunks > 3 else ""
        rows.append([str(rank), str(stage), layers + more, *(f"{seconds:.4f}" for seconds in time), f"{sum(time):.4f}"])
    memory = max(placed.memory(placed.replicas), key=lambda rank_memory: rank_memory.total)
    has = cluster.devices[placed.devices[memory.rank]].memory
    return [
        f"{counted(len(cluster), 'device')} on {counted(len(cluster.names), 'node')}; plan {brief(plan)}",
        f"a step of {counted(facts.global_batch_size, 'row')} of {counted(facts.seq_len, 'token')}, "
        f"{facts.microbatch_size} at once, "
        f"{facts.dtype}{products}: {played.ops:,} ops of {played.ranks:,} ranks, {len(played.replicas)} of "
        f"{counted(plan.replicas, 'replica')} unlike any other",
        "",
        f"{found.seconds:.4g} s a step, {found.tokens_per_second:,.0f} tokens/s, {each:,.4g} for each device, "
        f"MFU {100 * placed.mfu(found.seconds):.1f} %, bubble {100 * found.bubble:.1f} %",
        f"the time goes to {training_bottleneck(found)}",
        f"most memory: {amount(memory.total)} on rank {memory.rank}, of {amount(has)}"
        + (", as `tllm train` would need: it does not fit" if memory.total > has else ""),
        "",
        "where a step's time goes, s:",
        table(rows),
    ]


def _failure_lines(played: ClusterStep, failures: FailureEstimate | None) -> list[str]:
    if failures is None:
        return []
    rate = failures.useful * played.prediction.tokens_per_second
    return [
        "",
        f"failures: one in {failures.between / HOUR:.3g} h of any of {counted(failures.nodes, 'node')}; best "
        f"to save after {failures.best / 60:.3g} min of work",
        f"with a save every {failures.interval / 60:.3g} min: {100 * failures.useful:.1f} % of the time is useful, "
        f"{rate:,.0f} tokens/s in the long run",
    ]


def _as_json(played: ClusterStep, ranks: list[int], failures: FailureEstimate | None) -> dict[str, Any]:
    placed, found = played.placed, played.prediction
    timeline = found.timeline
    wires = {f"{a}-{b}": busy for (a, b), busy in timeline.link_busy.items()} if timeline else {}
    return {
        "goal": "train",
        "plan": str(placed.plan),
        "devices": len(placed.cluster),
        "ranks": played.ranks,
        "ops": played.ops,
        "replicas_played": len(played.replicas),
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
        "mfu": placed.mfu(found.seconds),
        "bubble": found.bubble,
        "bottleneck": training_bottleneck(found),
        "time": [{"rank": rank} | played.time(rank)._asdict() for rank in ranks],
        "wires_busy": wires,
        "memory": [asdict(memory) | {"total": memory.total} for memory in placed.memory(placed.replicas)],
        "failures": asdict(failures) if failures else None,
    }
