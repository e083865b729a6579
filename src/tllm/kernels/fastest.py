"""Which of several ways to compute the same is the fastest on this machine: timed by turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

REPEATS = 4
"""Of which the first, in which libraries set themselves up, counts only for candidates that are not timed again."""

HOPELESS = 4.0
LONG = 0.05
"""A candidate that takes so many times the best one's time, and so many seconds, is not timed again. In less time it
may only have been interrupted, or its library have set itself up."""

ENOUGH_SECONDS = 0.2
"""No candidate is timed again once all have taken so long together."""

NEARLY = 0.9
"""A candidate counts as beaten if its computing alone took at least so much of the winner's time. One that is favoured
is taken if the best one takes at least so much of its time."""


class Choice(NamedTuple):
    """The name of the candidate that is taken, and the seconds that each took at its best.

    `is_sure`: none of the others can have lost only because other programs had the processor meanwhile.
    """

    name: str
    seconds: dict[str, float]
    is_sure: bool = True


class BestTimes:
    """The best time of each candidate, and the least time for which this thread really had a processor meanwhile.

    The second is less than the first where other programs interrupted a candidate, or held up threads it waited for.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.computing: dict[str, float] = {}

    def run(self, name: str, candidate: Callable[[], object], replaces: bool = False) -> float:
        """Run a candidate once, and return its seconds. `replaces`: earlier runs of it count no more."""
        begun, computed = time.perf_counter(), time.thread_time()
        candidate()
        computed = time.thread_time() - computed
        taken = time.perf_counter() - begun
        known = not replaces and name in self.seconds
        self.seconds[name] = min(taken, self.seconds[name]) if known else taken
        self.computing[name] = min(computed, self.computing[name]) if known else computed
        return taken

    def fastest(self, favoured: str = "") -> Choice:
        """That the candidate is taken whose best time is least; or the one that is favoured, if that is near to it."""
        name = min(self.seconds, key=lambda name: self.seconds[name])
        is_near = favoured in self.seconds and NEARLY * self.seconds[favoured] <= self.seconds[name]
        return self.choice(favoured if is_near else name)

    def choice(self, name: str, times: float = 1.0) -> Choice:
        """That this candidate is taken, because the others take at least so many times as long."""
        limit = NEARLY * times * self.seconds[name]
        is_sure = all(seconds >= limit for other, seconds in self.computing.items() if other != name)
        return Choice(name, dict(self.seconds), is_sure)


def fastest(candidates: Mapping[str, Callable[[], object]], favoured: str = "") -> Choice:
    """Time every candidate by turns and take the one whose best time is least.

    `favoured`: that one is taken unless another is clearly faster, as it loses least where a core is not always free.
    """
    names, best, spent = list(candidates), BestTimes(), 0.0
    for repeat in range(REPEATS):
        for name in names:
            spent += best.run(name, candidates[name], replaces=repeat == 1)
        if spent > ENOUGH_SECONDS:
            break
        limit = max(LONG, HOPELESS * min(best.seconds.values()))
        names = [name for name in names if best.seconds[name] < limit]
    return best.fastest(favoured)


def next_power_of_two(number: int) -> int:
    """The least power of two that is not less; 1 for 0."""
    return 1 << max(0, number - 1).bit_length()
