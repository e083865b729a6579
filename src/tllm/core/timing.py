"""The mean time of a function, on a machine that other work may slow down for part of the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

LEAST = 2
ROUNDS = 20


def mean_seconds(work: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Mean seconds of one call, over as many calls as fit in `seconds`, at least two, after one that warms up.

    The mean and not the minimum: where a container may use a processor for only a part of each tenth of a second, a
    short call can fall into that part, and only the mean is what many calls take.
    """
    work()
    begun, count = clock(), 0
    while (taken := clock() - begun) < seconds or count < LEAST:
        work()
        count += 1
    return taken / count


def mean_seconds_each(
    works: Sequence[Callable[[], object]], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """The mean seconds of several functions, measured in turns, in `seconds` for all of them together.

    What slows the machine for a while slows them alike, so that their differences and ratios can be relied on.
    """
    for work in works:
        work()
    share = seconds / (len(works) * ROUNDS)
    taken, counts = [0.0] * len(works), [0] * len(works)
    for done in range(1, ROUNDS + 1):
        for place, work in enumerate(works):
            before, begun = taken[place], clock()
            while counts[place] == 0 or taken[place] < done * share:
                work()
                counts[place] += 1
                taken[place] = before + clock() - begun
    return [total / count for total, count in zip(taken, counts, strict=True)]
