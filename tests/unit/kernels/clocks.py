"""Clocks for what is chosen by its time: no machine, however busy, changes what a test finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest


class Clocks:
    """Wall time and this thread's own, which stand still but for what work says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.own = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(time, "thread_time", lambda: self.own)

    def takes(self, own: float, *waits: float) -> Callable[[], None]:
        """What computes for `own` seconds, and waits for the processor for so long in each run, the last ever after."""
        left: Iterator[float] = iter((*waits[:-1],))

        def run() -> None:
            self.own += own
            self.wall += own + next(left, waits[-1])

        return run
