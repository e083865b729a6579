"""What must hold of every choice of a plan: faster links and more memory never make it worse, pins are kept."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.unit.planner.search.test_serving_search import cluster_of, spec_of
from tllm.core.errors import CapacityError, PlanError
from tllm.planner.cluster.device import Cluster, LinkSpeed
from tllm.planner.cost.rank_bytes import AdapterFacts
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.search.serving_search import best_serving
from tllm.planner.search.training_constraints import TrainingConstraints
from tllm.planner.search.training_layouts import TrainingLayouts
from tllm.planner.search.training_search import best_training
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

STEPS = 20_000
FREE = TrainingConstraints()


def faster_links(cluster: Cluster, factor: float) -> Cluster:
    pairs = ((ends, LinkSpeed(link.latency, factor * link.bandwidth)) for ends, link in cluster.pairs)
    return replace(cluster, pairs=tuple(pairs))


def more_memory(cluster: Cluster, factor: float) -> Cluster:
    devices = (replace(device, memory=int(factor * device.memory)) for device in cluster.devices)
    return replace(cluster, devices=tuple(devices))


def served(spec: ModelSpec, cluster: Cluster, facts: ServingFacts) -> float:
    """Seconds of the best plan, infinite where nothing fits."""
    try:
        found = best_serving(spec, cluster, facts)
    except CapacityError:
        return float("inf")
    assert found.exact
    return found.choices[0].predicted.seconds


def trained(spec: ModelSpec, cluster: Cluster, facts: TrainingFacts, constraints: TrainingConstraints = FREE) -> float:
    try:
        found = best_training(spec, cluster, facts, steps=STEPS, constraints=constraints)
    except CapacityError:
        return float("inf")
    assert found.exact
    return found.choices[0].predicted.seconds


@pytest.mark.parametrize("seed", range(12))
def test_more_never_serves_slower(seed: int) -> None:
    draw = random.Random(seed)
    spec, cluster = spec_of(draw.randint(2, 6)), cluster_of(draw, 3)
    facts = ServingFacts("float32", draw.choice([8, 300]), 40, draw.choice([1, 5]))
    before = served(spec, cluster, facts)
    for better in (faster_links(cluster, 3.0), more_memory(cluster, 1.3)):
        assert served(spec, better, facts) <= before * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_more_never_trains_slower(seed: int) -> None:
    draw = random.Random(seed)
    spec, cluster, facts = spec_of(2), cluster_of(draw, 2), TrainingFacts(draw.choice([8, 64]), 2)
    before = trained(spec, cluster, facts)
    for better in (faster_links(cluster, 3.0), more_memory(cluster, 1.5)):
        assert trained(spec, better, facts) <= before * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_that_fits_fits_with_more_memory(seed: int) -> None:
    draw = random.Random(seed)
    cluster = more_memory(cluster_of(draw, 2), 1.4)
    plan = Plan.parse(draw.choice(["dp=2", "pp=2", "tp=2", "dp=2,zero=3"]), 2)
    placed = PlacedPlan(spec_of(2), plan, TrainingFacts(32, 4), cluster, (0, 1))
    for factor in (1.0, 1.01, 2.0):
        richer = replace(placed, cluster=more_memory(cluster, factor))
        assert richer.fits(richer.memory()) >= placed.fits(placed.memory())


def test_what_is_pinned_stays() -> None:
    """The size of microbatches, the device of rank 0, and what else the caller refuses; each costs time here."""
    draw = random.Random(3)
    spec, cluster, facts = spec_of(3), cluster_of(draw, 3), TrainingFacts(64, 4)
    cluster = more_memory(faster_links(cluster, 100.0), 2.0)
    free = trained(spec, cluster, facts)
    seen: list[Plan] = []

    def refuse(plan: Plan, facts: TrainingFacts) -> None:
        seen.append(plan)
        if plan.dp != (1,):
            raise PlanError("one replica", "as was asked for")

    for device in range(3):
        constraints = TrainingConstraints((2,), device, refuse)
        best = best_training(spec, cluster, facts, steps=STEPS, constraints=constraints).choices[0]
        assert best.placed.devices[0] == device
        assert best.placed.facts.microbatch_size == 2
        assert best.placed.plan.dp == (1,)
        assert best.predicted.seconds >= free * (1 - 1e-12)
    assert any(plan.dp != (1,) for plan in seen), "else the refusal was not put to the test"


@pytest.mark.parametrize("targets", [None, 5])
@pytest.mark.parametrize("layers", [(), (2,), (3,)])
def test_no_layout_is_faster_than_its_bound(layers: tuple[int, ...], targets: int | None) -> None:
    """Beside an adapter too, whose model has no gradients of its weights, nor of anything below the lowest adapter; and
    where few tokens of a row have logits."""
    spec, cluster = spec_of(4), cluster_of(random.Random(1), 2)
    facts = TrainingFacts(64, 4, adapter=AdapterFacts(2, ("q_proj",), layers=layers), target_tokens=targets)
    seen = 0
    for layout in TrainingLayouts(spec, more_memory(cluster, 100.0), facts, FREE):
        placed = PlacedPlan(spec, layout.plan, layout.facts, cluster, layout.devices)
        assert layout.lower_bound <= placed.predict().seconds * (1 + 1e-9), str(layout.plan)
        seen += 1
    assert seen > 20
