"""Predictions for stages whose ranks form a grid: what they hold, and when links make them faster or slower than 1D."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.planner.search.test_serving_search import FACTS, device_of, spec_of
from tllm.core.errors import PlanError
from tllm.engine.decode_recordings import MOST_ROWS
from tllm.planner.cluster.device import Cluster, LinkSpeed
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.planner.cost.serving_load import ExpectedBatch
from tllm.planner.cost.tensor_parallel.grid_team import PLAYED_ROWS, GridTeam
from tllm.planner.simulate.serving import ServingPrediction, all_reduce_bytes, predict_serving
from tllm.spec.grid.grid_shape import GridMode, grid_shape
from tllm.spec.model_spec import MoeSpec
from tllm.spec.plan import Plan

SPEC = spec_of(24, heads=16)
NO_LATENCY, SLOW_TO_ANSWER, NARROW = LinkSpeed(0.0, 1e15), LinkSpeed(1e-3, 1e15), LinkSpeed(0.0, 1e7)


def cluster_of(count: int, link: LinkSpeed, unplayed: float = 0.0) -> Cluster:
    names, device = tuple(f"n{i}" for i in range(count)), replace(device_of(900), unplayed_seconds=unplayed)
    return Cluster(names, (device,) * count, tuple(range(count)), (None,) * count, default=link)


def predicted(plan: str, link: LinkSpeed, concurrency: int = 2, unplayed: float = 0.0) -> ServingPrediction:
    made = Plan.parse(plan, SPEC.num_layers)
    cluster, facts = cluster_of(made.world_size, link, unplayed), replace(FACTS, concurrency=concurrency)
    return predict_serving(SPEC, made, cluster, tuple(range(made.world_size)), facts)


@pytest.mark.parametrize(
    "plan", ["tp=4,tensor=2d", "tp=8,tensor=2.5d", "tp=8,tensor=3d", "pp=2,tp=1+4,tensor=2d", "tp=16,tensor=2d"]
)
def test_what_is_held_is_what_the_plan_says(plan: str) -> None:
    ranks = rank_bytes(SPEC, Plan.parse(plan, SPEC.num_layers), "float32")
    assert [memory.weights for memory in predicted(plan, NO_LATENCY).memory] == [rank.weights for rank in ranks]


@pytest.mark.parametrize("plan", ["tp=4,tensor=2d", "tp=16,tensor=2d"])
def test_without_links_that_cost_anything_a_grid_is_as_fast(plan: str) -> None:
    """It reads more keys, as a column has them twice, and as many weights, or fewer where 1D has key heads twice."""
    grid = predicted(plan, NO_LATENCY).per_token
    one_way = predicted(plan.split(",")[0], NO_LATENCY).per_token
    assert 0.9 * one_way < grid < 1.2 * one_way


def test_links_that_answer_slowly_make_a_grid_slower() -> None:
    """Six sums in a layer for two, and one more for the logits and one for their norm."""
    for ranks in (4, 16):
        grid = predicted(f"tp={ranks},tensor=2d", SLOW_TO_ANSWER).per_token
        one_way = predicted(f"tp={ranks}", SLOW_TO_ANSWER).per_token
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
        grid = predicted(f"tp={ranks},tensor={mode}", NARROW, concurrency).per_token
        one_way = predicted(f"tp={ranks}", NARROW, concurrency).per_token
        assert low < grid / one_way < high, (ranks, mode, concurrency)


@pytest.mark.parametrize(("concurrency", "is_played"), [(1, True), (PLAYED_ROWS, True), (PLAYED_ROWS + 1, False)])
def test_layers_that_are_played_elsewhere_take_longer_on_a_grid(concurrency: int, is_played: bool) -> None:
    """By as much as each machine was measured to take. Replies alone: prompts are computed by every plan."""
    assert PLAYED_ROWS == MOST_ROWS
    for plan, seconds in (("tp=4,tensor=2d", 6e-4), ("tp=4,tensor=2d", 2e-5), ("tp=4", 0.0)):
        without, measured = (predicted(plan, NO_LATENCY, concurrency, unplayed) for unplayed in (0.0, seconds or 1e-3))
        assert measured.first_token == without.first_token
        more = SPEC.num_layers * seconds if is_played else 0.0
        assert measured.per_token - without.per_token == pytest.approx(more, abs=1e-12)


@pytest.mark.parametrize(
    ("ranks", "mode", "of_middle", "of_last"), [(4, "2d", 1 / 2, 0), (8, "3d", 3 / 4, 0), (8, "2.5d", 3 / 4, 1 / 4)]
)
def test_what_leaves_a_grid_is_put_together_from_columns_and_squares(
    ranks: int, mode: GridMode, of_middle: float, of_last: float
) -> None:
    """Hidden states that a rank sends, in parts of those of a batch; those of the last stage are sampled from."""
    shape, batch = grid_shape(mode, ranks), ExpectedBatch(64, 64, 16, 0)
    assert shape is not None
    team = GridTeam(SPEC, cluster_of(ranks, NARROW), tuple(range(ranks)), shape, FACTS)
    hidden = 64 * SPEC.hidden_size * 4
    middle, last = (team.ends_time(False, is_last, batch).sending * NARROW.bandwidth for is_last in (False, True))
    # Before, the leader sends all that came to it to each other rank.
    assert middle == pytest.approx((ranks - 1 + of_middle) * hidden)
    assert last == pytest.approx((ranks - 1 + of_last) * hidden)


def test_sums_of_a_grid_go_by_links_where_those_that_were_measured_went_through_memory() -> None:
    """Ranks of one machine: with 1D all share memory, the rows and columns of a grid do not."""
    memory = LinkSpeed(
        1e-5, 1e10, 2e-5, layer_sync_overhead=3e-5, hop_overhead=2e-4, hop_bandwidth=1e8, shares_memory=True
    )
    by_links = LinkSpeed(1e-5, 1e8, 2e-4)
    for plan, same in (("tp=4,tensor=2d", by_links), ("tp=4", replace(memory, hop_bandwidth=0.0, hop_overhead=None))):
        assert predicted(plan, memory).seconds == pytest.approx(predicted(plan, same).seconds, rel=1e-12)
    assert predicted("tp=4", memory).seconds < predicted("tp=4", by_links).seconds
    over_devices = replace(memory, shares_memory=False)  # which rows and columns are groups of, too
    assert predicted("tp=4,tensor=2d", over_devices).seconds < predicted("tp=4,tensor=2d", memory).seconds


def test_every_square_computes_all_tokens_that_see_those_after_them() -> None:
    """A layer of two squares takes as long as of one alone: it was predicted for half of the tokens."""
    both_ways, batch = replace(SPEC, bidirectional=True), ExpectedBatch(64, 2, 16, 0)
    grids: tuple[tuple[int, GridMode], ...] = ((8, "2.5d"), (4, "2d"))
    seconds = dict[tuple[str, bool], float]()
    for ranks, mode in grids:
        shape = grid_shape(mode, ranks)
        assert shape is not None
        for spec in (SPEC, both_ways):
            team = GridTeam(spec, cluster_of(ranks, NARROW), tuple(range(ranks)), shape, FACTS)
            seconds[mode, spec.bidirectional] = team.layer_time(spec.layers[0], batch).seconds
    assert seconds["2.5d", True] == seconds["2d", True] == seconds["2d", False] > seconds["2.5d", False]


def test_weights_of_few_bits_are_refused_and_plain_ones_by_their_bits_are_not() -> None:
    plan = Plan.parse("tp=4,tensor=2d", SPEC.num_layers)
    ask = SPEC, plan, cluster_of(4, NARROW), tuple(range(4))
    with pytest.raises(PlanError, match=r"tensor=2d and weights of 4\.5 bits: few bits are not") as refused:
        predict_serving(*ask, replace(FACTS, weight_bits=4.5))
    assert refused.value.hint == "leave tensor out: all models are cut one way (tensor=1d)"
    assert predict_serving(*ask, replace(FACTS, weight_bits=32.0)).seconds == predict_serving(*ask, FACTS).seconds


def test_bytes_of_a_token_are_those_of_the_stage_that_is_asked_for() -> None:
    plan = Plan.parse("pp=2,tp=1+4,tensor=2d", SPEC.num_layers)
    assert all_reduce_bytes(SPEC, plan, 0, FACTS) == 0
    heads, kv, width = 16 * 32, 8 * 32, 1024
    into, out = heads + 2 * kv + 2 * width, 2 * SPEC.hidden_size
    assert all_reduce_bytes(SPEC, plan, 1, FACTS) == 12 * 4 * ((into + out) // 2 + 2)


def test_experts_beside_an_mlp_are_a_third_sum_of_a_layer() -> None:
    moe = MoeSpec(num_experts=4, top_k=2, width=64, beside_mlp=True, style="gemma4")
    beside = replace(SPEC, layers=tuple(replace(layer, moe=moe) for layer in SPEC.layers))
    plan = Plan.parse("tp=2", SPEC.num_layers)
    assert 2 * all_reduce_bytes(beside, plan, 0, FACTS) == 3 * all_reduce_bytes(SPEC, plan, 0, FACTS)
