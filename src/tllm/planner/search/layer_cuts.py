"""Cuts of a model's layers into runs: the even one, the one whose slowest run is as fast as possible (of several such,
the one whose largest run has the fewest weights), and the one through all of whose runs a row passes soonest."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

ROUNDING = 1e-9
"""By so much of itself a sum of costs may be off."""

RunCost = Callable[[int, int, int], float]
"""What a run of layers [start, stop) costs, by (run, start, stop)."""

Together = Callable[[float, float], float]
"""What two runs cost together: the larger of both, or their sum."""


def even_bounds(layers: int, runs: int) -> tuple[int, ...]:
    """The layer at which each run starts, and the end; later runs take what is left over."""
    return tuple(layers * index // runs for index in range(runs + 1))


def balanced_bounds(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The same for runs in which layer n costs `costs[run][n]`: each has a layer, and the slowest is as fast as
    possible."""
    return _least(len(costs), len(costs[0]), _run_cost(costs), max)


def lightest_bounds(costs: Sequence[Sequence[float]], weights: Sequence[float]) -> tuple[int, ...]:
    """Of all cuts that are as fast as `balanced_bounds`, the one whose largest run has the fewest weights, which its
    replicas sum: layer n has `weights[n]`."""
    cost, held = _run_cost(costs), _run_cost([weights] * len(costs))
    slowest = max(cost(run, start, stop) for run, (start, stop) in enumerate(pairwise(balanced_bounds(costs))))
    limit = slowest * (1 + ROUNDING)

    def of_run(run: int, start: int, stop: int) -> float:
        return held(run, start, stop) if cost(run, start, stop) <= limit else math.inf

    return _least(len(costs), len(weights), of_run, max)


def quickest_bounds(
    costs: Sequence[Sequence[float]], weights: Sequence[float], rooms: Sequence[float]
) -> tuple[int, ...] | None:
    """The same for runs that are computed one after another: all together are as fast as possible, where run r has no
    more than `rooms[r]` of the weights. None where no cut has room."""
    cost, held = _run_cost(costs), _run_cost([weights] * len(costs))

    def of_run(run: int, start: int, stop: int) -> float:
        return cost(run, start, stop) if held(run, start, stop) <= rooms[run] else math.inf

    bounds = _least(len(costs), len(weights), of_run, operator.add)
    has_room = all(of_run(run, *ends) < math.inf for run, ends in enumerate(pairwise(bounds)))
    return bounds if has_room else None


def _run_cost(costs: Sequence[Sequence[float]]) -> RunCost:
    """Costs of layers that add up."""
    before = [[0.0, *accumulate(row)] for row in costs]
    return lambda run, start, stop: before[run][stop] - before[run][start]


def _least(runs: int, layers: int, cost: RunCost, together: Together) -> tuple[int, ...]:
    """The cut whose runs cost least together, each with a layer, by dynamic programming over (runs so far, layers so
    far), in runs x layers^2 steps."""
    best = [cost(0, 0, stop) for stop in range(layers + 1)]
    starts: list[list[int]] = []
    for run in range(1, runs):
        now, start_of = [math.inf] * (layers + 1), [run] * (layers + 1)
        for stop in range(run + 1, layers + 1):
            for start in range(run, stop):
                both = together(best[start], cost(run, start, stop))
                if both < now[stop]:
                    now[stop], start_of[stop] = both, start
        best = now
        starts.append(start_of)
    bounds = [layers]
    for start_of in reversed(starts):
        bounds.append(start_of[bounds[-1]])
    return (0, *reversed(bounds)) if runs > 1 else (0, layers)
