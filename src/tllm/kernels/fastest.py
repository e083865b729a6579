"""Which of several ways to compute the same is the fastest on this machine: timed by turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

REPEATS = 4
"""Of which the first, in which libraries set themselves up, only tells which candidates are hopeless."""

HOPELESS = 4.0
"""A candidate that takes so many times the best one's time is not timed again."""

ENOUGH_SECONDS = 0.2
"""No candidate is timed again once all have taken so long together."""


class Choice(NamedTuple):
    """The name of the fastest candidate, and the seconds that each took."""

    name: str
    seconds: dict[str, float]


def fastest(candidates: Mapping[str, Callable[[], object]]) -> Choice:
    """Time every candidate by turns and take the one whose best time is least."""
    names, best, spent = list(candidates), dict[str, float](), 0.0
    for repeat in range(REPEATS):
        for name in names:
            begun = time.perf_counter()
            candidates[name]()
            taken = time.perf_counter() - begun
            best[name] = taken if repeat < 2 else min(best[name], taken)
            spent += taken
        if spent > ENOUGH_SECONDS:
            break
        names = [name for name in names if best[name] < HOPELESS * min(best.values())]
    return Choice(min(best, key=lambda name: best[name]), best)


def next_power_of_two(number: int) -> int:
    """The least power of two that is not less; 1 for 0."""
    return 1 << max(0, number - 1).bit_length()
