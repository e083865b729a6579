"""`most_of`: small linear programs with `<=` alone, by the simplex method on a dense tableau (Dantzig 1947)."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_PIVOTS = 200
ROUNDING = 1e-11


def most_of(values: Sequence[float], demands: Sequence[Sequence[float]], supplies: Sequence[float]) -> float:
    """The greatest sum of x_j values_j over x >= 0 such that sum x_j demands_j[i] <= supplies_i for every i.

    `demands`: for each j its row. Infinite where nothing limits it, and where more than MOST_PIVOTS steps would be
    needed: an upper bound is right in any case.
    """
    rows = len(supplies)
    slack = [[float(i == j) for j in range(rows)] for i in range(rows)]
    table = [[*(row[i] for row in demands), *slack[i], supplies[i]] for i in range(rows)]
    gains = [*values, *([0.0] * (rows + 1))]
    limit = ROUNDING * max(map(abs, values), default=0.0)
    for _ in range(MOST_PIVOTS):
        gain = max(gains[:-1])
        if gain <= limit:
            return -gains[-1]
        column = gains.index(gain)
        ratios = [(row[-1] / row[column], i) for i, row in enumerate(table) if row[column] > ROUNDING]
        if not ratios:
            return math.inf
        pivot = min(ratios)[1]
        scale = table[pivot][column]
        of_pivot = table[pivot] = [one / scale for one in table[pivot]]
        for i, row in enumerate(table):
            factor = row[column]
            if factor and i != pivot:
                table[i] = [one - factor * other for one, other in zip(row, of_pivot, strict=True)]
        gains = [one - gain * other for one, other in zip(gains, of_pivot, strict=True)]
    return math.inf


def with_whole_numbers(
    demands: Sequence[Sequence[float]], supplies: Sequence[float]
) -> tuple[list[list[float]], list[float]]:
    """The demands and supplies of `most_of` with more limits, which whole numbers x keep as well: of those that demand
    d or more of something there are no more than supply // d (Chvátal 1973, Edmonds polytopes)."""
    rows = [(i, d) for i in range(len(supplies)) for d in sorted({demand[i] for demand in demands} - {0})]
    limited = [[*demand, *(float(demand[i] >= d) for i, d in rows)] for demand in demands]
    return limited, [*supplies, *(float(supplies[i] // d) for i, d in rows)]
