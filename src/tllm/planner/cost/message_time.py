"""Seconds of messages and of sums over ranks, from a link's latency L and bandwidth B: what `comm` makes of them.

S bytes one way      L + S / B, and M where whoever sends them was computing
a sum over n ranks   the less of M + L + (n - 1) S / B and 2 (M + L) + 2 (n - 1) / n S / B

with M what is lost when ranks meet that compute in between: caches are cold, threads wake up. Ranks of unlike speed
that work and sum in turn do not pay for both the slowest's work and the way: the faster one's message is under way
while the slower one works. With W the time that the slowest rank works before a sum, and V the next, a turn takes

    max(W + S e, (W + V) / 2 + L + S / B) + M

with e what a byte that it sends and takes costs the slowest rank's computing: the greatest mean of a cycle in who waits
for whom (Baccelli, Cohen, Olsder and Quadrat 1992, Synchronization and Linearity, chapter 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tllm.planner.cluster.device import LinkSpeed


class Parts(NamedTuple):
    """Seconds by where they go: products, reading memory, starting operations, sending bytes, bytes on their way."""

    compute: float = 0.0
    memory: float = 0.0
    operations: float = 0.0
    sending: float = 0.0
    latency: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.memory + self.operations + self.sending + self.latency

    def plus(self, other: Parts) -> Parts:
        return Parts(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: float) -> Parts:
        return Parts(*(count * a for a in self))


def one_way(size: float, link: LinkSpeed) -> Parts:
    return Parts(sending=size / link.rate(size), latency=link.latency)


def met_after_work(size: float, link: LinkSpeed) -> Parts:
    """One way, from a rank that was computing to one that was not."""
    return one_way(size, link).plus(Parts(latency=link.meeting))


def sum_over(ranks: int, size: float, link: LinkSpeed) -> Parts:
    """A sum of `size` bytes, all ranks as far apart as the two that `link` is between; nothing for one rank."""
    if ranks == 1:
        return Parts()
    meeting = Parts(latency=link.meeting)
    direct = one_way((ranks - 1) * size, link).plus(meeting)
    halves = one_way((ranks - 1) / ranks * size, link).plus(meeting).times(2)
    return min(direct, halves, key=lambda parts: parts.seconds)


def in_turn(works: Sequence[Parts], sums: Parts, lost: float) -> Parts:
    """What each rank computes, and sums over them all, again and again: seconds of a turn. `lost`, in meeting and by
    sending, even where all has come before.

    The slowest rank waits for the next one half of the time by which it is behind, or not at all.
    """
    slowest, *others = sorted(works, key=lambda one: one.seconds, reverse=True)
    if not others:
        return slowest
    waiting = slowest.plus(others[0]).times(0.5).plus(sums)
    return max(slowest.plus(Parts(latency=lost)), waiting, key=lambda one: one.seconds)


def lost_in_meeting(turn: float, works: tuple[float, float], way: float, alone: float) -> float:
    """M of a turn that was measured: no less than of sums `alone`, one after another."""
    return max(0.0, alone - way, unexplained(turn, works, way))


def unexplained(turn: float, works: tuple[float, float], way: float, sending: float = 0.0) -> float:
    """Seconds of a turn that was measured, less what the work of either rank explains, what a message takes on its way,
    and what `sending` it costs the slower rank."""
    return turn - max(max(works) + sending, sum(works) / 2 + way)
