"""`most_of`: small linear programs with `<=` alone, by the simplex method on a dense tableau (Dantzig 1947)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

MOST_PIVOTS = 200
ROUNDING = 1e-11


def most_of(values: Sequence[float], demands: Sequence[Sequence[float]], supplies: Sequence[float]) -> float:
    """The greatest sum of x_j values_j over x >= 0 such that sum x_j demands_j[i] <= supplies_i for every i.

    `demands`: for each j its row. Infinite where nothing limits it, and where more than MOST_PIVOTS steps would be
    needed: an upper bound is right in any case.
    """
    rows, columns = len(supplies), len(values)
    table = np.zeros((rows + 1, columns + rows + 1))
    table[:rows, :columns] = np.asarray(demands, dtype=float).reshape(columns, rows).T
    table[:rows, columns : columns + rows] = np.eye(rows)
    table[:rows, -1], table[-1, :columns] = supplies, values
    limit = ROUNDING * max(map(abs, values), default=0.0)
    for _ in range(MOST_PIVOTS):
        column = int(table[-1, :-1].argmax())
        if table[-1, column] <= limit:
            return float(-table[-1, -1])
        above = table[:rows, column] > ROUNDING
        if not above.any():
            return math.inf
        ratios = np.full(rows, math.inf)
        ratios[above] = table[:rows, -1][above] / table[:rows, column][above]
        pivot = int(ratios.argmin())
        table[pivot] /= table[pivot, column]
        factors = table[:, column].copy()
        factors[pivot] = 0.0
        table -= np.outer(factors, table[pivot])
    return math.inf
