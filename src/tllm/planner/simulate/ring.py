"""Plays the ring that the serving engine runs: batches go round the stages again and again, each one token further."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class RingStage(NamedTuple):
    """Seconds of a batch on a stage, and of its result on the way to the next one: its wire is busy while `sending`."""

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
    """`turns[stage]` in order; `total` until the last batch is back; seconds that stages and wires are busy."""

    spans: tuple[tuple[RingSpan, ...], ...]
    total: float
    busy: tuple[float, ...]
    sending: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they compute nothing."""
        return 1 - math.fsum(self.busy) / (len(self.busy) * self.total) if self.total else 0.0


def play_ring(stages: Sequence[RingStage], batches: int, turns: int) -> RingTimeline:
    """Let so many batches go round so often. A stage takes a batch when the one before is done and this one has come.

    Stages serve batches in their order, so that each (turn, batch, stage) finds all that it waits for played before.
    """
    free, wires = [0.0] * len(stages), [0.0] * len(stages)
    ready = [0.0] * batches
    played: list[list[RingSpan]] = [[] for _ in stages]
    for turn in range(turns):
        for batch in range(batches):
            for index, stage in enumerate(stages):
                start = max(free[index], ready[batch])
                stop = free[index] = start + stage.work
                played[index].append(RingSpan(batch, turn, start, stop))
                wires[index] = max(stop, wires[index]) + stage.sending
                ready[batch] = wires[index] + stage.latency
    count = batches * turns
    return RingTimeline(
        tuple(map(tuple, played)),
        max(ready),
        tuple(count * stage.work for stage in stages),
        tuple(count * stage.sending for stage in stages),
    )
