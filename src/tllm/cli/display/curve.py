"""A curve drawn in characters, for losses in a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a braille character's dots, by row and column."""
BRAILLE = 0x2800


def curve(values: Sequence[float], width: int = 64, height: int = 10, steps: int | None = None) -> list[str]:
    """Lines of text: `values` over their numbers, with the highest and the lowest at the left, `steps` wide in all.

    Where several values fall into one column their mean is drawn.
    """
    columns, rows = 2 * width, 4 * height
    total = max(steps or len(values), len(values), 2)
    means = _means(values, columns, total)
    if not means:
        return [""] * height
    low, high = min(means.values()), max(means.values())
    span = high - low or 1.0
    cells = [[0] * width for _ in range(height)]
    last: int | None = None
    for column, mean in sorted(means.items()):
        at = round((high - mean) / span * (rows - 1))
        for row in range(min(at, at if last is None else last), max(at, at if last is None else last) + 1):
            cells[row // 4][column // 2] |= DOTS[row % 4][column % 2]
        last = at
    left = [f"{high:7.3f} "] + [" " * 8] * (height - 2) + [f"{low:7.3f} "]
    return [label + "".join(chr(BRAILLE + bits) for bits in line) for label, line in zip(left, cells, strict=True)]


def _means(values: Sequence[float], columns: int, total: int) -> dict[int, float]:
    """The mean of the finite values that fall into each column."""
    fall: dict[int, list[float]] = {}
    for number, value in enumerate(values):
        if math.isfinite(value):
            fall.setdefault(number * columns // total, []).append(value)
    return {column: math.fsum(some) / len(some) for column, some in fall.items()}
