"""The search on many devices, made to search small clusters, against what is best there; and on many devices."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.planner.many_machines import cluster_of as machines_of
from benchmarks.planner.many_machines import model
from tests.unit.planner.search.test_serving_search import cluster_of, some_of, spec_of
from tllm.core.errors import CapacityError
from tllm.planner.bounds.training_bound import least_step_seconds
from tllm.planner.cluster.device import Cluster, Device, LinkSpeed, Tier
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.search import promising_meshes, training_layouts, training_search
from tllm.planner.search.device_meshes import Axes
from tllm.planner.search.training_constraints import MICROBATCHES, TrainingConstraints
from tllm.planner.search.training_search import best_training
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan


@pytest.fixture
def as_many(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Searches as if every cluster had many devices."""

    def search(spec: ModelSpec, cluster: Cluster, facts: TrainingFacts) -> float:
        with monkeypatch.context() as patch:
            for module in (training_layouts, training_search):
                patch.setattr(module, "MOST_DEVICES", 0)
            found = best_training(spec, cluster, facts)
        assert not found.exact
        best = found.choices[0]
        assert best.placed.fits(best.placed.memory())
        return best.predicted.seconds

    return search


@pytest.mark.parametrize("seed", some_of(12, 3))
def test_small_clusters_are_planned_nearly_as_well(seed: int, as_many: Any) -> None:
    draw = random.Random(3000 + seed)
    spec, cluster = spec_of(3), cluster_of(draw, draw.choice([2, 2, 3]), 2)
    facts = TrainingFacts(64, 6)
    try:
        best = best_training(spec, cluster, facts).choices[0].predicted.seconds
    except CapacityError:
        with pytest.raises(CapacityError):
            as_many(spec, cluster, facts)
        return
    seconds = as_many(spec, cluster, facts)
    assert seconds <= 1.25 * best


def test_meshes_are_of_different_devices_of_the_cluster_and_rank_0_is_where_it_must() -> None:
    spec, cluster, facts = model(), machines_of(40), TrainingFacts(1024, 640, dtype="bfloat16")
    last = 39
    meshes = promising_meshes.promising_meshes(spec, cluster, facts, TrainingConstraints(first_device=last))
    for sized in meshes:
        devices = sized.mesh.devices
        assert devices[0] == last and len(set(devices)) == len(devices) and set(devices) <= set(range(40))
        assert len(devices) == sized.mesh.axes.dp * sized.mesh.axes.pp * sized.mesh.axes.cp * sized.mesh.axes.tp
        assert sized.sizes and set(sized.sizes) <= set(MICROBATCHES)
    assert len({sized.mesh.axes for sized in meshes}) > 4


def two_speeds(fast: int, slow: int) -> Cluster:
    """Machines of 4 Tflop/s, then machines of 10, behind 2.5 Gbit/s."""
    kinds = [Device(32 * 2**30, (("bfloat16", ((1024.0, speed),)),), speed / 40) for speed in (4e12, 1e13)]
    count = fast + slow
    return Cluster(
        names=tuple(f"n{i}" for i in range(count)),
        devices=(kinds[0],) * slow + (kinds[1],) * fast,
        node_of=tuple(range(count)),
        inside=(None,) * count,
        default=LinkSpeed(2e-4, 3.125e8),
    )


def test_slower_machines_lead_replicas_whose_first_stage_has_few_layers() -> None:
    """With 12 stages the first has one layer and its embedding, and most others three: 11 fast machines and one that is
    0.4 times as fast are as good as 12 fast ones."""
    spec, cluster, facts = model(), two_speeds(22, 2), TrainingFacts(1024, 24 * 64, dtype="bfloat16")
    group = promising_meshes.DeviceGroup(cluster, facts, tuple(range(24)))
    axes, share = Axes(2, 12, 1, 1), promising_meshes.StepEstimate(spec, facts).first_share(12)
    assert share == pytest.approx(1 / 3)
    orders = group.orders(axes, TrainingConstraints(), share)
    assert all(len(set(order)) == 24 for order in orders)
    assert orders[-1][::12] == (1, 0) and orders[:-1] == group.orders(axes, TrainingConstraints())
    assert group.orders(axes, TrainingConstraints(), 0.5)[-1][0] not in (0, 1), "too slow to lead half of the work"
    layers = "1+" + "3+" * 10 + "1"
    plan = Plan.parse(f"pp=12,tp=1,layers={layers},dp=2,zero=1,schedule=zero_bubble,depth=2", 32)
    led, by_speed = (
        PlacedPlan(spec, plan, facts, cluster, order, steady=True).predict()
        for order in orders[:: len(orders) - 1][::-1]
    )
    assert led.seconds < 0.45 * by_speed.seconds


def test_replicas_led_by_slower_machines_are_laid_out() -> None:
    cluster, facts = two_speeds(22, 2), TrainingFacts(1024, 24 * 64, dtype="bfloat16")
    meshes = promising_meshes.promising_meshes(model(), cluster, facts, TrainingConstraints())
    assert any(one.mesh.axes.pp == 12 and set(one.mesh.devices[::12]) == {0, 1} for one in meshes)


def test_an_all_reduce_is_compressed_or_late_both_ways() -> None:
    """Where a plan without ZeRO sends less than one that gathers new weights."""
    spec, group = model(), SimpleNamespace(widest=LinkSpeed(0.0, 1e9))
    axes: Any = SimpleNamespace(dp=2, cp=1, pp=2, tp=1)
    exact, few = TrainingFacts(64, 6, dtype="bfloat16"), TrainingFacts(64, 6, dtype="bfloat16", compression="int8")

    def seconds(facts: TrainingFacts, work: float) -> float:
        return promising_meshes.StepEstimate(spec, facts)._with_gradients(cast(Any, group), axes, work)

    elements = promising_meshes.StepEstimate(spec, exact)._elements / 2 * 1 / 2
    scattered = elements * 4 * few.gradient_share([], 1) / 1e9
    assert scattered < elements * 2 / 1e9
    assert seconds(exact, 1.0) == pytest.approx(1.0 + elements * 6 / 1e9)
    assert seconds(few, 1.0) == pytest.approx(1.0 + 2 * scattered)
    late = replace(exact, late=True)
    work = elements * 12 / 1e9
    assert seconds(late, work) == work, "all of it overlaps with the next step"
    assert seconds(late, 0.0) == pytest.approx(elements * 6 / 1e9)


def unlike_machines(count: int) -> Cluster:
    """None is as fast as another, or has as much memory, at two sites."""
    draw = random.Random(count)
    speeds, memories = ([low + (high - low) * draw.random() for _ in range(count)] for low, high in ((4, 10), (16, 40)))
    devices = tuple(
        Device(int(memory * 2**30), (("bfloat16", ((1.0, speed * 5e10), (1024.0, speed * 1e12))),), speed * 25e9)
        for speed, memory in zip(speeds, memories, strict=True)
    )
    places = [draw.randrange(2) for _ in range(count)]
    links = (LinkSpeed(1e-4, 1.25e9), LinkSpeed(2e-4, 6e8))
    return Cluster(
        names=tuple(f"n{i}" for i in range(count)),
        devices=devices,
        node_of=tuple(range(count)),
        inside=(None,) * count,
        default=LinkSpeed(1e-3, 3e8),
        tiers=tuple(
            Tier(f"site{site}", tuple(0 if there == site else -1 for there in places), link)
            for site, link in enumerate(links)
        ),
    )


def test_machines_none_of_which_is_like_another_get_a_plan_that_uses_nearly_all() -> None:
    cluster, facts = unlike_machines(18), TrainingFacts(1024, 576, dtype="bfloat16")
    found = best_training(model(), cluster, facts, steps=40)
    best = found.choices[0]
    assert not found.exact and best.placed.fits(best.placed.memory()) and len(best.placed.devices) >= 16
    bound = least_step_seconds(model(), cluster, facts, MICROBATCHES)
    assert bound <= best.predicted.seconds <= 1.25 * bound


@pytest.mark.parametrize("seed", some_of(12, 3))
def test_few_unlike_machines_with_too_many_layouts_are_planned_nearly_as_well(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(4000 + seed)
    spec, cluster, facts = spec_of(3), cluster_of(draw, 3, 3), TrainingFacts(64, 6)
    try:
        best = best_training(spec, cluster, facts).choices[0].predicted.seconds
    except CapacityError:
        return
    monkeypatch.setattr(training_layouts, "MOST_LAYOUTS", 40)
    found = best_training(spec, cluster, facts)
    assert not found.exact
    assert best * (1 - 1e-12) <= found.choices[0].predicted.seconds <= 1.25 * best
