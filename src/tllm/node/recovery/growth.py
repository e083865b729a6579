"""`Growth`: when to stop a running cluster for a moment to take in ranks that waiting nodes could have.

Taking them in costs a pause of every rank that computes. Without a pause they wait for the next loss, which stops all
ranks anyway and takes them in at no extra cost; nobody knows when it comes. So the work goes on until the computing
that it has missed equals the cost of a pause, as one rents skis until the rent has come to their price. Whatever
happens then, it has lost at most twice what the best choice in hindsight would have lost (Karlin, Manasse, Rudolph and
Sleator, Competitive snoopy caching, Algorithmica 3, 1988). One of two ranks is taken in after as many seconds as a
pause takes, 16 of 10,000 after some hours.
"""

from __future__ import annotations

from collections.abc import Callable


class Growth:
    """What the present epoch has missed so far, in rank-seconds. `now` is a clock.

    `pause`: seconds that the last epoch took to begin. Before any has begun it is 0, and every rank is worth a pause.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.pause = 0.0
        self._missed, self._more, self._since = 0.0, 0, 0.0

    def opened(self, pause: float) -> None:
        """An epoch is open, which took so many seconds to begin."""
        self.pause = pause
        self._missed, self._more, self._since = 0.0, 0, self._now()

    def is_worth(self, ranks: int, more: int) -> bool:
        """Whether so many `ranks` that compute are to pause now for so many more, which could be had since the last
        call of this."""
        now = self._now()
        self._missed += self._more * (now - self._since)
        self._more, self._since = more, now
        return more > 0 and self._missed >= ranks * self.pause
