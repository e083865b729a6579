"""`Growth`: when ranks that could be had are worth the pause that taking them in costs.

A pause stops every rank that computes. Without it the ranks are missed that nodes are here for, until the next loss,
which stops all ranks anyway and takes them in at no price. When that comes nobody knows. So the work goes on until it
has missed as much as the pause costs, as one rents skis until the rent comes to their price: whatever happens then, it
has lost at most twice what it would have lost had all been foreseen (Karlin, Manasse, Rudolph and Sleator, Competitive
snoopy caching, Algorithmica 3, 1988). One of two ranks is taken in after as many seconds as a pause has, 16 of 10,000
after some hours.
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
