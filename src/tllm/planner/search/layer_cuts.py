"""Cuts of a model's layers into runs: the even one, and the one whose slowest run is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def even_bounds(layers: int, runs: int) -> tuple[int, ...]:
    """The layer at which each run starts, and the end; later runs take what is left over."""
    return tuple(layers * index // runs for index in range(runs + 1))


def balanced_bounds(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The same for runs in which layer n costs `costs[run][n]`: each has a layer, and the slowest is as fast as
    possible.

    Found by dynamic programming over (runs so far, layers so far), in runs x layers^2 steps.
    """
    layers, runs = len(costs[0]), len(costs)
    before = [[0.0, *accumulate(row)] for row in costs]
    best = [before[0][stop] for stop in range(layers + 1)]
    starts: list[list[int]] = []
    for run in range(1, runs):
        now, start_of = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for stop in range(run + 1, layers + 1):
            for start in range(run, stop):
                slowest = max(best[start], before[run][stop] - before[run][start])
                if slowest < now[stop]:
                    now[stop], start_of[stop] = slowest, start
        best = now
        starts.append(start_of)
    bounds = [layers]
    for start_of in reversed(starts):
        bounds.append(start_of[bounds[-1]])
    return (0, *reversed(bounds)) if runs > 1 else (0, layers)
