"""`Turns`: a contender's side of taking turns, in a process of its own that the driver (`Contender`) talks to.

It needs Python alone, so that trainers of other environments can take turns too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping


class Turns:
    """A contender's side. Call it without a loss before the first step, and with the loss after every step."""

    def __init__(self, **facts: Callable[[], float]) -> None:
        """`facts` are counters; the report of a turn says how much each has grown in it."""
        self._facts, self._left, self._start = facts, 0, 0.0
        self._losses: list[float] = []
        self._before: dict[str, float] = {}

    def __call__(self, loss: float | None = None) -> None:
        if loss is not None:
            self._losses.append(loss)
        if self._left == 0:
            self._report()
        self._left -= 1

    def _report(self) -> None:
        seconds, now = time.perf_counter() - self._start, {name: count() for name, count in self._facts.items()}
        grown = {name: count - self._before.get(name, 0) for name, count in now.items()}
        print(json.dumps({"seconds": seconds, "losses": self._losses, **grown}), flush=True)
        self._losses, self._before = [], now
        self._left = int(sys.stdin.readline())  # the driver kills this process when it is done
        self._start = time.perf_counter()


class Sampled:
    """What steps that sample completions have come to: the sums of their mean lengths, their mean rewards, and the
    seconds that sampling took. `counters` are facts for `Turns`."""

    def __init__(self) -> None:
        self.length = self.reward = self.seconds = 0.0

    def add(self, metrics: Mapping[str, float], seconds: float) -> None:
        """A step's metrics, by TRL's names."""
        self.length += metrics.get("completions/mean_length", 0.0)
        self.reward += metrics.get("reward", 0.0)
        self.seconds += seconds

    @property
    def counters(self) -> dict[str, Callable[[], float]]:
        return {"length": lambda: self.length, "reward": lambda: self.reward, "sampling": lambda: self.seconds}
