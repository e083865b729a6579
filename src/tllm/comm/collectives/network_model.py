"""`NetworkModel`: what a group knows of its links, and what rounds of messages over them cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Traffic = Mapping[tuple[int, int], float]
"""Payload bytes of one round, by (source, target): messages that are on their way at the same time."""

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class NetworkModel:
    """`latency[a][b]` seconds one way and `rate[a][b]` bytes/s from rank a to rank b; `hosts[a]` numbers a's machine.

    `message` is the seconds of work that a rank has with one message, sent or received.
    """

    latency: Matrix
    rate: Matrix
    hosts: tuple[int, ...]
    message: float = 0.0

    @property
    def size(self) -> int:
        return len(self.hosts)

    def seconds(self, rounds: Iterable[Traffic]) -> float:
        """The time of rounds that follow one another."""
        return sum(self._round(traffic) for traffic in rounds if traffic)

    def port(self, rank: int) -> float:
        """Bytes/s that a rank's machine sends and receives at most: the rate of its best link to another machine."""
        if len(set(self.hosts)) == 1:
            return self._best([rank], inside=True)
        return self._best([other for other in range(self.size) if self.hosts[other] == self.hosts[rank]], inside=False)

    def _round(self, traffic: Traffic) -> float:
        """Latency, the busiest rank's messages, and the busiest wire or port: each port carries all that goes by it.

        Between machines the ranks of one share a port; inside one each rank has its own.
        """
        messages, loads = Counter[int](), defaultdict[tuple[str, int, bool], float](float)
        slowest = 0.0
        for (a, b), size in traffic.items():
            inside = self.hosts[a] == self.hosts[b]
            messages.update((a, b))
            slowest = max(slowest, size / self.rate[a][b])
            loads["out", a if inside else self.hosts[a], inside] += size
            loads["in", b if inside else self.hosts[b], inside] += size
        for (_, number, inside), size in loads.items():
            ranks = [number] if inside else [rank for rank in range(self.size) if self.hosts[rank] == number]
            slowest = max(slowest, size / self._best(ranks, inside))
        return max(self.latency[a][b] for a, b in traffic) + max(messages.values()) * self.message + slowest

    def _best(self, ranks: Sequence[int], inside: bool) -> float:
        """The best rate to or from these ranks of one machine, inside it or to others."""
        return max(
            max(self.rate[rank][other], self.rate[other][rank])
            for rank in ranks
            for other in range(self.size)
            if other != rank and (self.hosts[other] == self.hosts[rank]) == inside
        )


def equal(size: int, latency: float, rate: float, message: float = 0.0) -> NetworkModel:
    """As many machines, with links that are all alike."""
    row = (latency,) * size, (rate,) * size
    return NetworkModel((row[0],) * size, (row[1],) * size, tuple(range(size)), message)
