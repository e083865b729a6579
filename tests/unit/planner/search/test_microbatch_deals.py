"""The deal of microbatches against dealing them one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tllm.planner.search.microbatch_deals import ReplicaBound, StageSeconds, balanced_deal, replica_bounds

seconds = st.floats(1e-3, 10.0)
stages = st.lists(seconds, min_size=2, max_size=2).map(lambda costs: StageSeconds((costs[0],) * 3, costs[1]))
replicas = st.lists(st.tuples(stages, stages), min_size=1, max_size=5)


def dealt_one_by_one(bounds: list[ReplicaBound], microbatches: int) -> tuple[int, ...]:
    counts = [1] * len(bounds)
    for _ in range(microbatches - len(bounds)):
        following = [bound.seconds(count + 1) for bound, count in zip(bounds, counts, strict=True)]
        counts[following.index(min(following))] += 1
    return tuple(counts)


@given(replicas, st.integers(0, 300), st.integers(1, 3))
def test_as_dealt_one_by_one(costs: list[tuple[StageSeconds, StageSeconds]], more: int, copies: int) -> None:
    costs = [cost for cost in costs for _ in range(copies)]
    bounds = replica_bounds(costs, [range(1), range(1, 3)])
    assert len(set(map(id, bounds))) <= len(costs) // copies, "replicas that are alike share a bound"
    microbatches = len(costs) + more
    counts = balanced_deal(bounds, microbatches)
    assert sum(counts) == microbatches and min(counts) >= 1
    slowest = max(bound.seconds(count) for bound, count in zip(bounds, counts, strict=True))
    expected = dealt_one_by_one(bounds, microbatches)
    assert slowest == max(bound.seconds(count) for bound, count in zip(bounds, expected, strict=True))


def test_a_slow_replica_has_one_at_least() -> None:
    bounds = replica_bounds([(StageSeconds((1.0,), 0.0),), (StageSeconds((1000.0,), 0.0),)], [range(1)])
    assert balanced_deal(bounds, 10) == (9, 1)
