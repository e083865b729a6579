"""Time on a machine that other work may slow down: the mean time of a function, and waiting for other processes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

LEAST = 2
ROUNDS = 20

TURN_SECONDS = 1.0
"""Who waits longer than this looks at its clock in between."""

HELD_UP_SECONDS = 1.0
"""A look that comes so much later than it should tells that the process has stood still."""


class AwakeClock:
    """Seconds that only grow, and stand still while this process does, as one that somebody suspends.

    Whoever waits for another process counts by it, and so never takes its own pause for the other's silence. It must
    be read at least `every` seconds while it counts; a longer time without is a pause.
    """

    def __init__(self, every: float = TURN_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._longest = clock, every + HELD_UP_SECONDS
        self._stood, self._read = 0.0, clock()

    def __call__(self) -> float:
        now = self._clock()
        passed, self._read = now - self._read, now
        if passed > self._longest:
            self._stood += passed
        return now - self._stood

    def turn(self, until: float) -> float:
        """How long to wait before it is to be read again: TURN_SECONDS at most, 0 once it is `until`. Who waits for
        ever need not look."""
        left = until - self()
        return left if math.isinf(left) else max(0.0, min(left, TURN_SECONDS))


class Deadline:
    """Ends after so many seconds in which this process runs: whoever waits for it asks for one turn after another."""

    def __init__(self, seconds: float, clock: AwakeClock | None = None) -> None:
        self._clock = clock or AwakeClock()
        self._until = self._clock() + seconds

    def turn(self) -> float:
        """How long to wait before it is asked again; 0 once it is over."""
        return self._clock.turn(self._until)


def wait_awake(changed: threading.Condition, ready: Callable[[], object], seconds: float) -> bool:
    """As `changed.wait_for`, but for so many seconds in which this process runs."""
    deadline = Deadline(seconds)
    while not ready():
        turn = deadline.turn()
        if not turn:
            return False
        changed.wait(None if math.isinf(turn) else turn)
    return True


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
