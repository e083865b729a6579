"""`NetworkModel`: the latency and bandwidth between the ranks of a group, and the seconds of rounds of messages.

The model is that of Hockney (1994), latency + bytes / rate, with a cost for each message and with ports that the ranks
of one machine share.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Traffic = Mapping[tuple[int, int], float]
"""Payload bytes of one round, by (source rank, target rank): messages that are on their way at the same time."""

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class NetworkModel:
    """The links of a group, measured or assumed.

    From rank a to rank b `latency[a][b]` is the seconds one way and `rate[a][b]` the bytes/s. `hosts[a]` is the number
    of a's machine. `message` is the seconds of work that a rank has with one message, sent or received.
    """

    latency: Matrix
    rate: Matrix
    hosts: tuple[int, ...]
    message: float = 0.0

    @property
    def size(self) -> int:
        return len(self.hosts)

    def seconds(self, rounds: Iterable[Traffic]) -> float:
        """The time of rounds of which each begins when the one before has ended."""
        return sum(self._round(traffic) for traffic in rounds if traffic)

    def port(self, rank: int) -> float:
        """Bytes/s of a rank's network port: the best rate of a link from its machine to another one.

        In a group on one machine, the best rate of a link of this rank.
        """
        if len(set(self.hosts)) == 1:
            return self._best([rank], inside=True)
        return self._best([other for other in range(self.size) if self.hosts[other] == self.hosts[rank]], inside=False)

    def _round(self, traffic: Traffic) -> float:
        """Seconds of one round: the greatest latency, the busiest rank's messages, and the busiest link or port.

        Between machines the ranks of one machine share a port, which sends or receives all their bytes; inside a
        machine each rank has a port of its own.
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
        """The best rate to or from these ranks of one machine: inside it, or to other machines."""
        return max(
            max(self.rate[rank][other], self.rate[other][rank])
            for rank in ranks
            for other in range(self.size)
            if other != rank and (self.hosts[other] == self.hosts[rank]) == inside
        )
