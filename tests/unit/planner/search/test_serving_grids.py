"""The search for a serving plan proposes grids of ranks where they are predicted to win, and nowhere else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from tests.unit.planner.search.test_serving_search import cluster_of, device_of, every_plan, fits, some_of, spec_of
from tllm.core.errors import CapacityError, PlanError
from tllm.planner.cluster.device import Cluster, LinkSpeed
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.search import serving_search
from tllm.planner.search.serving_search import ServingSearchResult, best_serving
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.model_spec import ModelSpec, MoeSpec
from tllm.spec.plan import Plan

FAST, PROMPTS = LinkSpeed(2e-6, 5e10), ServingFacts("float32", 4000, 1)
"""Links and requests with which several squares, which divide the tokens of prompts, are faster than anything else."""

SPEC = replace(spec_of(2, heads=32), hidden_size=4096, head_dim=128, num_kv_heads=32, intermediate_size=11008)


def alike(count: int, link: LinkSpeed = FAST) -> Cluster:
    device = device_of(4000, 1e12, 1e13)
    names = tuple(f"n{i}" for i in range(count))
    return Cluster(names, (device,) * count, tuple(range(count)), (None,) * count, default=link)


def grids_of(spec: ModelSpec, cluster: Cluster, facts: ServingFacts) -> Iterator[tuple[Plan, tuple[int, ...]]]:
    """Every plan with a square of ranks."""
    for plan, devices in every_plan(spec, cluster, facts, "cut"):
        is_even = all(set(stage.shares) == {1} for stage in plan.stages)
        if is_even and {stage.tp for stage in plan.stages} - {1} == {4}:
            yield msgspec.structs.replace(plan, tensor="2d"), devices


def least_of(spec: ModelSpec, cluster: Cluster, facts: ServingFacts, is_grid: bool) -> float | None:
    plans, seconds = grids_of if is_grid else lambda *case: every_plan(*case, "cut"), list[float]()
    for plan, devices in plans(spec, cluster, facts):
        try:
            predicted = predict_serving(spec, plan, cluster, devices, facts)
        except PlanError:
            continue
        if fits(predicted, cluster, devices):
            seconds.append(predicted.seconds)
    return min(seconds, default=None)


@pytest.mark.parametrize("seed", some_of(24, 4))
def test_no_plan_with_a_grid_is_faster_than_the_one_that_is_chosen(seed: int) -> None:
    """Of four and five machines of two kinds, some of which form a square, alone or beside other stages.

    In every third case a square wins: into narrow MLPs it sums less than a layer that is cut one way sums of hidden
    states.
    """
    draw = random.Random(seed)
    spec, cluster = spec_of(draw.randint(1, 2), heads=4), cluster_of(draw, draw.choice([4, 4, 5]))
    facts = ServingFacts("float32", draw.choice([8, 300]), draw.choice([1, 40]), draw.choice([1, 4, 40]))
    if wins := seed % 3 == 0:
        device, link = device_of(100, draw.choice([2e7, 5e7])), LinkSpeed(0.0, draw.choice([1e7, 3e7]))
        cluster = replace(alike(len(cluster), link), devices=(device,) * len(cluster))
        spec, facts = replace(spec, intermediate_size=64, vocab_size=256), ServingFacts("float32", 8, 40)
    one_way, grid = (least_of(spec, cluster, facts, is_grid) for is_grid in (False, True))
    if one_way is None and grid is None:
        with pytest.raises(CapacityError):
            best_serving(spec, cluster, facts)
        return
    found = best_serving(spec, cluster, facts)
    best = found.choices[0]
    assert found.exact
    assert best.predicted.seconds == pytest.approx(min(filter(None, (one_way, grid))), rel=1e-12)
    assert fits(best.predicted, cluster, best.devices)
    assert not wins or best.plan.tensor == "2d"
    if one_way is not None:
        slower = [choice for choice in found.choices if choice.plan.tensor != "1d"]
        assert all(choice.predicted.seconds < one_way for choice in slower)


def without_grids(spec: ModelSpec, cluster: Cluster, facts: ServingFacts) -> ServingSearchResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving_search, "MODES", ("1d",))
        return best_serving(spec, cluster, facts)


def test_several_squares_are_chosen_for_prompts_over_fast_links() -> None:
    cluster = alike(12)
    best, other = (search(SPEC, cluster, PROMPTS).choices[0] for search in (best_serving, without_grids))
    assert str(best.plan) == "pp=1,tp=12,layers=2,tensor=2.5d"
    assert best.predicted.seconds < other.predicted.seconds
    best.plan.check_serving()


@pytest.mark.parametrize(("count", "facts"), [(4, PROMPTS), (12, replace(PROMPTS, prompt=64, reply=128))])
def test_where_no_grid_wins_the_result_is_that_of_a_search_without(count: int, facts: ServingFacts) -> None:
    cluster = alike(count)
    found, other = best_serving(SPEC, cluster, facts), without_grids(SPEC, cluster, facts)
    assert found.choices == other.choices
    assert found.exact == other.exact


def test_nothing_is_proposed_that_the_engine_refuses() -> None:
    """Experts, weights of few bits, and heads or columns that do not go round."""
    cluster = alike(12)
    experts = MoeSpec(num_experts=4, top_k=2, width=256)
    layers = tuple(replace(layer, moe=experts) for layer in SPEC.layers)
    cases = (
        (replace(SPEC, layers=layers), PROMPTS),
        (SPEC, replace(PROMPTS, weight_bits=4.5)),
        (replace(SPEC, attention_sinks=True), PROMPTS),
        (replace(SPEC, num_heads=1, num_kv_heads=1), PROMPTS),
    )
    for spec, facts in cases:
        assert {choice.plan.tensor for choice in best_serving(spec, cluster, facts).choices} == {"1d"}
