"""Simulates the ring of the serving engine: batches go round the stages, and each round is one decode step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class RingStage(NamedTuple):
    """Seconds of a batch on a stage (`work`), and of its result on the link to the next one, which is busy while
    `sending`."""

    work: float
    sending: float = 0.0
    latency: float = 0.0


class RingSpan(NamedTuple):
    """One batch on one stage's clock, in seconds."""

    batch: int
    round: int
    start: float
    stop: float


@dataclass(frozen=True)
class RingTimeline:
    """What was played."""

    spans: tuple[tuple[RingSpan, ...], ...]
    """Of each stage, in order."""
    total: float
    """Seconds until the last batch is back."""
    busy: tuple[float, ...]
    """Seconds that each stage computes."""
    sending: tuple[float, ...]
    """Seconds that each stage's link sends."""

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they compute nothing."""
        return 1 - math.fsum(self.busy) / (len(self.busy) * self.total) if self.total else 0.0


def play_ring(stages: Sequence[RingStage], batches: int, rounds: int) -> RingTimeline:
    """Let so many batches go round so often. A stage starts a batch when the one before is done and this one arrived.

    Stages take batches in their order, so that all that a (round, batch, stage) waits for was played before it.
    """
    free, wires = [0.0] * len(stages), [0.0] * len(stages)
    ready = [0.0] * batches
    played: list[list[RingSpan]] = [[] for _ in stages]
    for round_ in range(rounds):
        for batch in range(batches):
            for index, stage in enumerate(stages):
                start = max(free[index], ready[batch])
                stop = free[index] = start + stage.work
                played[index].append(RingSpan(batch, round_, start, stop))
                wires[index] = max(stop, wires[index]) + stage.sending
                ready[batch] = wires[index] + stage.latency
    count = batches * rounds
    return RingTimeline(
        tuple(map(tuple, played)),
        max(ready),
        tuple(count * stage.work for stage in stages),
        tuple(count * stage.sending for stage in stages),
    )
