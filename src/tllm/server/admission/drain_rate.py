"""`DrainRate`: how fast sequences end, measured, from which follows when one more may begin."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

KEPT = 64
"""Ends that are looked at, the newest."""

WINDOW_SECONDS = 300.0
"""Older ends tell nothing of now."""

LONGEST_SECONDS = 600.0
"""Nobody is sent away for longer."""


class DrainRate:
    """Counts sequences that end; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=KEPT)

    def ended(self) -> None:
        """One has ended now."""
        self._ends.append(self._clock())

    def seconds_to_end(self, count: int) -> float:
        """Until so many more will have ended, at the rate of late; 1 where too few ends were seen to tell."""
        now = self._clock()
        while self._ends and now - self._ends[0] > WINDOW_SECONDS:
            self._ends.popleft()
        if len(self._ends) < 2:
            return 1.0
        # A pause since the last one counts: nothing may end any more.
        seconds_each = (now - self._ends[0]) / (len(self._ends) - 1)
        return min(LONGEST_SECONDS, max(1, count) * seconds_each)
