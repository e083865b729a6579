"""`StaleSynchronousClocks`: how many steps each replica has taken, and who may go on (stale synchronous parallel, Ho et
al., NIPS 2013)."""

from __future__ import annotations

import math

ASYNCHRONOUS = -1
"""The `max_staleness` without a bound."""


class StaleSynchronousClocks:
    """The steps that each replica has pushed. To compute step t, counted from 1, it reads weights that hold

        every step of every replica up to t - 1 - max_staleness

    and so is never more than `max_staleness` steps ahead of the slowest; 0 is synchronous, -1 has no bound.
    """

    def __init__(self, replicas: int, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self._pushed: list[float] = [0] * replicas

    @property
    def pushed(self) -> tuple[int, ...]:
        """By replica; of those that left, as many as anyone else's."""
        most = max((steps for steps in self._pushed if steps < math.inf), default=0)
        return tuple(int(min(steps, most)) for steps in self._pushed)

    def start(self, step: int) -> None:
        """Every replica has taken `step` steps, in a run before this one."""
        self._pushed = [step] * len(self._pushed)

    def push(self, replica: int, step: int) -> None:
        """A replica's gradient of this step is in the weights."""
        assert self.follows(replica, step)
        self._pushed[replica] = step

    def follows(self, replica: int, step: int) -> bool:
        """Whether this is the step that the replica must push next: none is left out and none comes twice."""
        return self._pushed[replica] == step - 1

    def leave(self, replica: int) -> None:
        """A replica is done, and nobody waits for it any more."""
        self._pushed[replica] = math.inf

    def may_read(self, step: int) -> bool:
        """Whether the weights may be read to compute `step` with."""
        return self.max_staleness == ASYNCHRONOUS or min(self._pushed) >= step - 1 - self.max_staleness
