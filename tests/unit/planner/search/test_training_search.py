"""The search for a training plan against all plans there are, tried one by one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product
from typing import Any

import msgspec
import pytest

from tests.unit.planner.search.test_serving_search import cluster_of, some_of, spec_of
from tllm.core.errors import CapacityError, PlanError
from tllm.planner.cluster.device import Cluster
from tllm.planner.cluster.execution import Execution
from tllm.planner.cost.rank_work import TrainingFacts, deal_microbatches
from tllm.planner.search.stage_options import whole_shares
from tllm.planner.search.training_search import best_training
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan, Stage
from tllm.spec.trainable import check_trainable

ORDERS: list[dict[str, Any]] = [
    *({"schedule": name, "depth": depth} for name in ("1f1b", "zero_bubble") for depth in (1, 2, 3)),
    {"schedule": "gpipe"},
]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *inner, total)))


def shares_of(cluster: Cluster, devices: tuple[int, ...], facts: TrainingFacts, axes: tuple[int, ...]) -> Any:
    """The same for all ranks; or by the speed of the slowest in each place of each stage."""
    dp, pp, cp, tp = axes
    by_speed = []
    for stage in range(pp):
        rates = [
            min(
                cluster.devices[devices[((r * pp + stage) * cp + c) * tp + place]].matrix_rate("float32", facts.seq_len)
                for r in range(dp)
                for c in range(cp)
            )
            for place in range(tp)
        ]
        by_speed.append(whole_shares(rates))
    return {((1,) * tp,) * pp, tuple(by_speed)}


def layouts(spec: ModelSpec, cluster: Cluster, facts: TrainingFacts) -> Iterator[tuple[Plan, tuple[int, ...]]]:
    for count in range(1, len(cluster) + 1):
        widths = range(1, count + 1)
        all_axes = [axes for axes in product(widths, repeat=4) if axes[0] * axes[1] * axes[2] * axes[3] == count]
        for devices, axes, chunks in product(permutations(range(len(cluster)), count), all_axes, (1, 2, 4)):
            dp, pp, cp, _ = axes
            if (pp == 1 and chunks > 1) or pp * chunks > spec.num_layers or dp > facts.microbatches:
                continue
            for shares, parts, counts in product(
                shares_of(cluster, devices, facts, axes),
                compositions(spec.num_layers, pp * chunks),
                compositions(facts.microbatches, dp),
            ):
                stops = [sum(parts[: i + 1]) for i in range(len(parts))]
                runs = tuple(Stage(stops[i] - n, stops[i], shares[i % pp]) for i, n in enumerate(parts))
                deal_of = (1,) * dp if len(set(counts)) == 1 else counts
                for ep in [ep for ep in range(1, dp + 1) if dp % ep == 0 and (ep == 1 or spec.layers[0].moe)]:
                    yield Plan(runs, dp=deal_of, cp=cp, ep=ep, chunks=chunks), devices


def every_plan(
    spec: ModelSpec, cluster: Cluster, facts: TrainingFacts
) -> Iterator[tuple[Plan, tuple[int, ...], TrainingFacts]]:
    for size in (1, 2, 4):
        sized = replace(facts, microbatch_size=size)
        if size > facts.global_batch_size:
            continue
        for plan, devices in layouts(spec, cluster, sized):
            orders = ORDERS if plan.pp > 1 and plan.chunks == 1 else [{}]
            orders = [{"schedule": "interleaved"}] if plan.chunks > 1 else orders
            zeros = (0, 1, 2, 3) if plan.replicas * plan.cp > 1 else (0,)
            sequences = (False, True) if plan.stages[0].tp > 1 else (False,)
            for order, zero, sequence, again in product(orders, zeros, sequences, ("none", "selective", "layer")):
                more = {"zero": zero, "sequence": sequence, "recompute": again}
                yield msgspec.structs.replace(plan, **order, **more), devices, sized


def least_seconds(spec: ModelSpec, cluster: Cluster, facts: TrainingFacts, execution: Execution | None = None) -> float:
    """Of all plans that a trainer takes and that fit; infinite where none does."""
    plans = every_plan(spec, cluster, facts)
    return min((seconds_of(spec, plan, sized, cluster, on, execution) for plan, on, sized in plans), default=math.inf)


def seconds_of(
    spec: ModelSpec,
    plan: Plan,
    facts: TrainingFacts,
    cluster: Cluster,
    devices: tuple[int, ...],
    execution: Execution | None = None,
) -> float:
    """Infinite where a trainer does not take the plan, or it does not fit."""
    try:
        check_trainable(plan, spec, deal_microbatches(facts.microbatches, plan.dp))
        placed = PlacedPlan(spec, plan, facts, cluster, devices, execution=execution)
        memory = placed.memory()
    except PlanError:
        return math.inf
    if any(one.total > cluster.devices[devices[one.rank]].memory for one in memory):
        return math.inf
    return placed.predict().seconds


@pytest.mark.parametrize("seed", some_of(100, 25))
def test_no_plan_is_faster_than_the_one_that_is_chosen(seed: int) -> None:
    draw = random.Random(1000 + seed)
    spec = spec_of(draw.randint(1, 3), draw.choice([(None,), (16, None)]))
    cluster = cluster_of(draw, draw.choice([1, 2, 2]))
    facts = TrainingFacts(draw.choice([8, 64]), draw.randint(1, 3))
    compare(spec, cluster, facts)


def test_of_three_devices_too() -> None:
    draw = random.Random(7)
    compare(spec_of(2), cluster_of(draw, 3), TrainingFacts(32, 2))


def compare(spec: ModelSpec, cluster: Cluster, facts: TrainingFacts) -> None:
    least = least_seconds(spec, cluster, facts)
    if least == math.inf:
        with pytest.raises(CapacityError, match="more would be enough"):
            best_training(spec, cluster, facts, steps=100_000)
        return
    found = best_training(spec, cluster, facts, steps=100_000)
    assert found.exact
    assert found.choices[0].predicted.seconds == pytest.approx(least, rel=1e-12)
    assert found.choices[0].placed.fits(found.choices[0].placed.memory())
