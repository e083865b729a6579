"""A clock for tests of what is measured: how long something takes is what the test says, on any machine."""

from __future__ import annotations

import threading

LOOK = 2e-3
"""Seconds that a look at the clock takes, so that what is repeated for some time comes to an end."""


class OwnClock:
    """Moved by looks at it and by sleeps, which take no time, of any thread."""

    def __init__(self) -> None:
        self._now, self._moves = 0.0, threading.Lock()

    def now(self) -> float:
        return self._moved(LOOK)

    def sleep(self, seconds: float) -> None:
        self._moved(seconds)

    def _moved(self, seconds: float) -> float:
        with self._moves:
            self._now += seconds
            return self._now
