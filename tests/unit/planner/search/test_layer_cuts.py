"""Cuts of layers into runs, against all that there are."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from tllm.planner.search.layer_cuts import balanced_bounds, lightest_bounds, quickest_bounds


@pytest.mark.parametrize("seed", range(20))
def test_the_fastest_cut_and_of_these_the_one_with_the_fewest_weights(seed: int) -> None:
    draw = random.Random(seed)
    layers, runs = draw.randint(2, 9), draw.randint(1, 4)
    runs = min(runs, layers)
    costs = [[draw.randint(1, 3) for _ in range(layers)] for _ in range(runs)]
    weights = [draw.randint(1, 5) for _ in range(layers)]

    def slowest(bounds: tuple[int, ...]) -> int:
        return max(sum(costs[run][start:stop]) for run, (start, stop) in enumerate(pairwise(bounds)))

    def heaviest(bounds: tuple[int, ...]) -> int:
        return max(sum(weights[start:stop]) for start, stop in pairwise(bounds))

    every = [(0, *inner, layers) for inner in combinations(range(1, layers), runs - 1)]
    least = min(map(slowest, every))
    fast, light = balanced_bounds(costs), lightest_bounds(costs, weights)
    assert fast in every and light in every
    assert slowest(fast) == slowest(light) == least
    assert heaviest(light) == min(heaviest(bounds) for bounds in every if slowest(bounds) == least)


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_whose_runs_are_fastest_one_after_another_of_those_with_room(seed: int) -> None:
    draw = random.Random(seed)
    layers = draw.randint(2, 9)
    runs = min(draw.randint(1, 4), layers)
    costs = [[draw.randint(1, 9) for _ in range(layers)] for _ in range(runs)]
    weights, rooms = [draw.randint(1, 5) for _ in range(layers)], [draw.randint(4, 16) for _ in range(runs)]
    with_room = {
        bounds: sum(sum(costs[run][start:stop]) for run, (start, stop) in enumerate(pairwise(bounds)))
        for bounds in ((0, *inner, layers) for inner in combinations(range(1, layers), runs - 1))
        if all(sum(weights[start:stop]) <= rooms[run] for run, (start, stop) in enumerate(pairwise(bounds)))
    }
    found = quickest_bounds(costs, weights, rooms)
    assert (found is None) == (not with_room)
    assert found is None or with_room[found] == min(with_room.values())


def test_a_table_at_an_end_takes_a_layer_from_it() -> None:
    """Seven stages of 32 layers, the last with logits worth a layer and a half, the first with a table."""
    costs = [[1.0] * 32 for _ in range(7)]
    costs[-1] = [*costs[-1][:-1], 2.5]
    weights = [2.4, *[1.0] * 30, 2.4]
    assert [stop - start for start, stop in pairwise(lightest_bounds(costs, weights))] == [4, 5, 5, 5, 5, 5, 3]
    assert max(stop - start for start, stop in pairwise(balanced_bounds(costs))) == 5
