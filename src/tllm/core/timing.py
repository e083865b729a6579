"""How long something takes on an average, where a machine may also be held back for part of the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

LEAST = 2
ROUNDS = 20


def mean_seconds(work: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call, over as many as `seconds` hold and two at the least, after one that warms up.

    The mean and not the best: of a processor that is lent for a part of each tenth of a second only the mean is true.
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
    """The same of several in `seconds` together, by turns, so that what slows a machine for a while slows them alike.

    What comes of their differences, or of the ones beside the others, is then still true.
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
    return [one / count for one, count in zip(taken, counts, strict=True)]
