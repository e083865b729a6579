"""How long something takes on an average, where a machine may also be held back for part of the time."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST = 2


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
