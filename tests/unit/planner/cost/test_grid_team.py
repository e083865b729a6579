"""Predictions for stages whose ranks form a grid: what they hold, and when links make them faster or slower than 1D."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.planner.search.test_serving_search import FACTS, device_of, spec_of
from tllm.planner.cluster.device import Cluster, LinkSpeed
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.planner.simulate.serving import ServingPrediction, all_reduce_bytes, predict_serving
from tllm.spec.plan import Plan

SPEC = spec_of(24, heads=16)
NO_LATENCY, SLOW_TO_ANSWER, NARROW = LinkSpeed(0.0, 1e15), LinkSpeed(1e-3, 1e15), LinkSpeed(0.0, 1e7)


def predicted(plan: str, link: LinkSpeed, concurrency: int = 2) -> ServingPrediction:
    made = Plan.parse(plan, SPEC.num_layers)
    count = made.world_size
    names = tuple(f"n{i}" for i in range(count))
    cluster = Cluster(names, (device_of(900),) * count, tuple(range(count)), (None,) * count, default=link)
    return predict_serving(SPEC, made, cluster, tuple(range(count)), replace(FACTS, concurrency=concurrency))


@pytest.mark.parametrize(
    "plan", ["tp=4,tensor=2d", "tp=8,tensor=2.5d", "tp=8,tensor=3d", "pp=2,tp=1+4,tensor=2d", "tp=16,tensor=2d"]
)
def test_what_is_held_is_what_the_plan_says(plan: str) -> None:
    ranks = rank_bytes(SPEC, Plan.parse(plan, SPEC.num_layers), "float32")
    assert [memory.weights for memory in predicted(plan, NO_LATENCY).memory] == [rank.weights for rank in ranks]


@pytest.mark.parametrize("plan", ["tp=4,tensor=2d", "tp=16,tensor=2d"])
def test_without_links_that_cost_anything_a_grid_is_as_fast(plan: str) -> None:
    """It reads more keys, as a column has them twice, and as many weights, or fewer where 1D has key heads twice."""
    grid, one_way = (predicted(text, NO_LATENCY).per_token for text in (plan, plan.split(",")[0]))
    assert 0.9 * one_way < grid < 1.2 * one_way


def test_links_that_answer_slowly_make_a_grid_slower() -> None:
    """Six sums in a layer for two, and one more for the logits and one for their norm."""
    for ranks in (4, 16):
        grid, one_way = (predicted(f"tp={ranks}{more}", SLOW_TO_ANSWER).per_token for more in (",tensor=2d", ""))
        assert 2.5 < grid / one_way < 3.5


def test_narrow_links_make_several_squares_faster_for_many_tokens_and_others_slower() -> None:
    """Where nothing but bytes counts: 1D sends 3.75 T D of two long sums, a square of 16 ranks 5.25, four squares of 4
    ranks 1.75 and 0.75 of keys."""
    for ranks, mode, concurrency, low, high in (
        (16, "2.5d", 64, 0.55, 0.8),
        (16, "2.5d", 2, 1.5, 2.5),
        (16, "2d", 64, 1.25, 1.5),
        (8, "3d", 64, 1.5, 3.0),
    ):
        grid, one_way = (
            predicted(f"tp={ranks}{more}", NARROW, concurrency).per_token for more in (f",tensor={mode}", "")
        )
        assert low < grid / one_way < high, (ranks, mode, concurrency)


def test_bytes_of_a_token_are_those_of_the_stage_that_is_asked_for() -> None:
    plan = Plan.parse("pp=2,tp=1+4,tensor=2d", SPEC.num_layers)
    assert all_reduce_bytes(SPEC, plan, 0, FACTS) == 0
    heads, kv, width = 16 * 32, 8 * 32, 1024
    into, out = heads + 2 * kv + 2 * width, 2 * SPEC.hidden_size
    assert all_reduce_bytes(SPEC, plan, 1, FACTS) == 12 * 4 * ((into + out) // 2 + 2)
