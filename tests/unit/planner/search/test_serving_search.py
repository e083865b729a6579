"""The search for a serving plan against all plans there are, tried one by one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import pytest

from tests.support.selection import soak_but
from tllm.core.errors import CapacityError, PlanError
from tllm.planner.cluster.device import Cluster, Device, LinkSpeed
from tllm.planner.cost.cache_room import RUNTIME_BYTES
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.search import serving_search
from tllm.planner.search.serving_search import best_serving
from tllm.planner.search.stage_options import Division, shares_of
from tllm.planner.simulate.serving import ServingPrediction, predict_serving
from tllm.spec.model_spec import LayerSpec, ModelSpec, MoeSpec, RopeSpec
from tllm.spec.plan import Experts, Plan, Stage

MIB = 2**20


def spec_of(
    layers: int, windows: Sequence[int | None] = (None,), moe: MoeSpec | None = None, heads: int = 8
) -> ModelSpec:
    return ModelSpec(
        family="llama",
        vocab_size=4000,
        hidden_size=256,
        intermediate_size=1024,
        num_heads=heads,
        num_kv_heads=max(1, heads // 2),
        head_dim=32,
        layers=tuple(LayerSpec(RopeSpec(10000.0, 32), windows[i % len(windows)], moe) for i in range(layers)),
        norm_eps=1e-5,
        activation="silu",
        max_model_len=4096,
        attention_scale=32**-0.5,
    )


def cluster_of(draw: random.Random, count: int, of_kinds: int = 2) -> Cluster:
    """Of few kinds, so that some are alike, with links that may all be unequal."""
    kinds = [
        Device(
            memory=RUNTIME_BYTES + draw.choice([12, 20, 40, 100]) * MIB,
            flop_rates=(("float32", ((1.0, draw.choice([1e9, 4e9])), (256.0, draw.choice([5e9, 2e10])))),),
            memory_bandwidth=draw.choice([1e9, 3e9, 1e10]),
            operation_seconds=draw.choice([0.0, 1e-5]),
        )
        for _ in range(of_kinds)
    ]
    kinds = [
        replace(
            one,
            driver_seconds=((1.0, 3e6 / one.memory_bandwidth),),
            follower_seconds=((1.0, 2e6 / one.memory_bandwidth),),
            after_wait_seconds=1e6 / one.memory_bandwidth,
        )
        for one in kinds
    ]
    links = [LinkSpeed(draw.choice([1e-5, 1e-3]), draw.choice([1e6, 1e8])) for _ in range(3)]
    unequal = draw.random() < 0.7
    pairs = {(a, b): draw.choice(links) if unequal else links[0] for a in range(count) for b in range(count) if a != b}
    return Cluster(
        names=tuple(f"n{i}" for i in range(count)),
        devices=tuple(draw.choice(kinds) for _ in range(count)),
        node_of=tuple(range(count)),
        inside=(None,) * count,
        pairs=tuple(pairs.items()),
    )


def some_of(count: int, quick: int) -> list[Any]:
    """Seeds, of which only the first are tried each time."""
    return [pytest.param(seed, marks=[] if seed < quick else pytest.mark.soak) for seed in range(count)]


def teams(devices: Sequence[int], most: int) -> Iterator[list[tuple[int, ...]]]:
    """Every way to put some of the devices in stages, one after another, of up to `most` devices in any order."""
    yield []
    for size in range(1, min(len(devices), most) + 1):
        for team in permutations(devices, size):
            for rest in teams([device for device in devices if device not in team], most):
                yield [team, *rest]


def cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, layers), stages - 1):
        yield (0, *inner, layers)


def each_shares(
    cluster: Cluster, stages: Sequence[tuple[int, ...]], facts: ServingFacts
) -> Iterator[list[tuple[int, ...]]]:
    if not stages:
        yield []
        return
    for shares in shares_of(cluster, stages[0], facts):
        for rest in each_shares(cluster, stages[1:], facts):
            yield [shares, *rest]


def every_plan(
    spec: ModelSpec, cluster: Cluster, facts: ServingFacts, experts: Experts
) -> Iterator[tuple[Plan, tuple[int, ...]]]:
    for stages in teams(range(len(cluster)), spec.num_heads):
        for shares in each_shares(cluster, stages, facts) if stages else ():
            for cut in cuts(spec.num_layers, len(stages)):
                runs = tuple(Stage(a, b, part) for a, b, part in zip(cut, cut[1:], shares, strict=False))
                yield Plan(runs, experts), tuple(device for team in stages for device in team)


def fits(predicted: ServingPrediction, cluster: Cluster, devices: Sequence[int]) -> bool:
    return all(one.total <= cluster.devices[d].memory for one, d in zip(predicted.memory, devices, strict=True))


def least_seconds(spec: ModelSpec, cluster: Cluster, facts: ServingFacts) -> float | None:
    least = None
    for experts in ("cut", "spread") if spec.layers[0].moe else ("cut",):
        for plan, devices in every_plan(spec, cluster, facts, experts):
            try:
                predicted = predict_serving(spec, plan, cluster, devices, facts)
            except PlanError:
                continue
            if fits(predicted, cluster, devices) and (least is None or predicted.seconds < least):
                least = predicted.seconds
    return least


@pytest.mark.parametrize("seed", some_of(100, 30))
def test_no_plan_is_faster_than_the_one_that_is_chosen(seed: int) -> None:
    draw = random.Random(seed)
    moe = MoeSpec(num_experts=4, top_k=2, width=256) if draw.random() < 0.15 else None
    spec = spec_of(draw.randint(1, 6), draw.choice([(None,), (64, None)]), moe)
    cluster = cluster_of(draw, draw.choice([1, 2, 2, 3, 3]), draw.choice([1, 2, 4]))
    facts = ServingFacts("float32", draw.choice([8, 300]), draw.choice([1, 40]), draw.choice([1, 4, 6]))
    facts = replace(facts, num_speculative_tokens=draw.choice([0, 0, 2]), acceptance=draw.choice([0.2, 0.8]))
    least = least_seconds(spec, cluster, facts)
    if least is None:
        with pytest.raises(CapacityError):
            best_serving(spec, cluster, facts)
        return
    found = best_serving(spec, cluster, facts)
    best = found.choices[0]
    assert found.exact
    assert best.predicted.seconds == pytest.approx(least, rel=1e-12)
    assert fits(best.predicted, cluster, best.devices)


@pytest.mark.parametrize("seed", some_of(10, 1))
def test_stages_stand_in_the_best_order_for_unequal_links(seed: int) -> None:
    """Of one head each device is a stage of its own, and each holds so little that most must take part."""
    draw = random.Random(seed)
    spec, count = spec_of(6, heads=1), 5
    devices = [
        Device(RUNTIME_BYTES + draw.choice([9, 12, 16]) * MIB, (("float32", ((1.0, 1e10),)),), draw.choice([1e9, 3e9]))
        for _ in range(count)
    ]
    pairs = {
        (a, b): LinkSpeed(draw.choice([1e-4, 3e-3, 2e-2]), draw.choice([1e6, 1e8]))
        for a in range(count)
        for b in range(count)
        if a != b
    }
    names = tuple(f"n{i}" for i in range(count))
    cluster = Cluster(names, tuple(devices), tuple(range(count)), (None,) * count, pairs=tuple(pairs.items()))
    facts = ServingFacts("float32", 8, 40, draw.choice([1, 5]))
    least = least_seconds(spec, cluster, facts)
    if least is None:
        with pytest.raises(CapacityError):
            best_serving(spec, cluster, facts)
        return
    found = best_serving(spec, cluster, facts)
    assert found.exact and found.choices[0].predicted.seconds == pytest.approx(least, rel=1e-12)


def many(devices: Sequence[Device]) -> Cluster:
    names = tuple(f"n{i}" for i in range(len(devices)))
    link = LinkSpeed(1e-4, 1e8)
    return Cluster(names, tuple(devices), tuple(range(len(devices))), (None,) * len(devices), default=link)


def device_of(mib: int, bandwidth: float = 3e9, rate: float = 1e10) -> Device:
    return Device(RUNTIME_BYTES + mib * MIB, (("float32", ((1.0, rate),)),), bandwidth)


FACTS = ServingFacts("float32", 8, 40, 2)


def test_the_model_goes_to_those_with_the_most_memory_where_the_fastest_have_too_little() -> None:
    cluster = many([*[device_of(6, 1e10)] * 20, *[device_of(60)] * 3])
    found = best_serving(spec_of(12, heads=1), cluster, FACTS)
    best = found.choices[0]
    assert not found.exact and fits(best.predicted, cluster, best.devices)
    assert {20, 21, 22} & set(best.devices)


@pytest.mark.parametrize("heads", soak_but([1], [1, 8]))
def test_more_and_smaller_machines_hold_a_model_together(heads: int) -> None:
    """Most devices have room for one or two layers."""
    cluster = many([*[device_of(8)] * 37, *[device_of(13)] * 3])
    spec = spec_of(24 * min(2, heads), heads=heads)
    best = best_serving(spec, cluster, FACTS).choices[0]
    assert len(best.devices) > 16 and len(set(best.devices)) == len(best.devices)
    assert fits(best.predicted, cluster, best.devices)
    assert [stage.start for stage in best.plan.stages[1:]] == [stage.stop for stage in best.plan.stages[:-1]]
    assert best.plan.stages[-1].stop == spec.num_layers


def test_layers_that_fit_on_no_machine_alone_are_shared() -> None:
    cluster = many([device_of(4)] * 48)
    best = best_serving(spec_of(12), cluster, FACTS).choices[0]
    assert {len(stage.shares) for stage in best.plan.stages} <= {2, 4, 8} and fits(
        best.predicted, cluster, best.devices
    )


def test_faster_machines_are_given_more_layers_in_a_long_pipeline() -> None:
    fast, slow = device_of(22, 1e10), device_of(22, 1e9)
    spec, cluster = spec_of(84, heads=1), many([fast if i % 2 else slow for i in range(24)])
    best = best_serving(spec, cluster, replace(FACTS, concurrency=4)).choices[0]
    layers = {device: stage.stop - stage.start for device, stage in zip(best.devices, best.plan.stages, strict=True)}
    each = [[n for device, n in layers.items() if device % 2 == odd] for odd in (0, 1)]
    assert len(layers) > 16 and len(each[1]) == 12
    assert sum(each[1]) / len(each[1]) > sum(each[0]) / len(each[0])


def test_a_model_that_all_machines_together_cannot_hold_is_refused() -> None:
    with pytest.raises(CapacityError, match="and 24 nodes have"):
        best_serving(spec_of(200, heads=1), many([device_of(8)] * 24), FACTS)


@pytest.mark.parametrize("reply", [1, 10])
def test_what_has_no_room_takes_forever_at_least(reply: int) -> None:
    cluster, facts = many([device_of(8)] * 2), replace(FACTS, reply=reply)
    searches = serving_search._Searches(spec_of(200, heads=1), cluster, facts, range(2), [Division()]).searches
    assert searches and all(search.root_bound == math.inf for search in searches)


@pytest.mark.parametrize("seed", some_of(40, 10))
def test_long_pipelines_are_no_faster_than_the_best_plan_and_fit(seed: int) -> None:
    draw = random.Random(seed)
    spec, cluster = spec_of(draw.randint(2, 5)), cluster_of(draw, 3)
    least = least_seconds(spec, cluster, FACTS)
    choices = serving_search._Pipelines(spec, cluster, FACTS).choices()
    assert all(fits(one.predicted, cluster, one.devices) for one in choices)
    if least is None:
        assert not choices
    for one in choices:
        assert one.predicted.seconds >= least * (1 - 1e-12)  # type: ignore[operator]


def test_a_stage_of_small_layers_at_the_end_has_room_where_one_at_the_beginning_has_none() -> None:
    """The second device has no room for any layer with experts, which the first two are."""
    layers = spec_of(2, moe=MoeSpec(num_experts=16, top_k=2, width=256), heads=1).layers + spec_of(2).layers
    spec, cluster = replace(spec_of(4, heads=1), layers=layers), many([device_of(31), device_of(13)])
    least = least_seconds(spec, cluster, FACTS)
    best = best_serving(spec, cluster, FACTS).choices[0]
    assert [(stage.start, stage.stop) for stage in best.plan.stages] == [(0, 2), (2, 4)]
    assert best.predicted.seconds == least and fits(best.predicted, cluster, best.devices)
