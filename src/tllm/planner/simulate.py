"""Plays a pipeline schedule on ideal clocks: when each stage does what, how long that takes, how much it waits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tllm.ground.errors import PlanError
from tllm.spec.playable import play
from tllm.spec.schedule import Hop, Op, Place, Schedule


@dataclass(frozen=True)
class Work:
    """Seconds that one microbatch takes on one place; a whole backward takes both of its halves."""

    forward: float
    backward_input: float
    backward_weight: float

    def __post_init__(self) -> None:
        for seconds in (self.forward, self.backward_input, self.backward_weight):
            if not 0 <= seconds < math.inf:
                raise PlanError(f"work of {seconds} seconds", "give seconds of 0 or more")


@dataclass(frozen=True)
class LinkSpeed:
    """One directed link: busy for bytes / bandwidth (bytes per second); what it sent lands `latency` seconds later."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf or not self.bandwidth > 0:
            raise PlanError(
                f"a link with a latency of {self.latency} s and {self.bandwidth} bytes/s",
                "give a latency of 0 or more and a bandwidth above 0",
            )


class Span(NamedTuple):
    """One op on one stage's clock, in seconds from the start of the step."""

    op: Op
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """What `simulate` found. `spans[stage]` in order; `peak_live[stage]` as `Schedule.peak_live` counts them.

    `link_busy` is, for each directed link between stages that carried anything, the seconds it was sending.
    """

    spans: tuple[tuple[Span, ...], ...]
    total: float
    busy: tuple[float, ...]
    peak_live: tuple[int, ...]
    link_busy: dict[tuple[int, int], float]

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they compute nothing."""
        return 1 - math.fsum(self.busy) / (len(self.busy) * self.total) if self.total else 0.0


def simulate(
    schedule: Schedule,
    work: Work | Sequence[Sequence[Work]],
    links: LinkSpeed | Mapping[tuple[int, int], LinkSpeed] | None = None,
    hop_bytes: int = 0,
) -> Timeline:
    """Play a schedule. `work`: one for all places or `work[stage][chunk]`; `links`: one for all or by (source, target).

    A stage starts an op when the one before is done and its input has landed. Links work beside the stages; each
    carries one tensor of `hop_bytes` bytes at a time, in the order sent. Without `links` hops take no time. Lists that
    `build` did not make want `check` first.
    """
    costs = _costs(schedule, work)
    wires = _Wires(_speeds(schedule, LinkSpeed() if links is None else links), hop_bytes)
    clock = [0.0] * schedule.stages
    spans: list[list[Span]] = [[] for _ in range(schedule.stages)]
    landed: dict[Hop, float] = {}
    for stage, op in play(schedule):
        start = clock[stage]
        needed = schedule.receives(stage, op)
        if needed is not None:
            start = max(start, landed.pop(needed))
        stop = clock[stage] = start + costs[Place(stage, op.chunk)][op.kind]
        spans[stage].append(Span(op, start, stop))
        sent = schedule.sends(stage, op)
        if sent is not None:
            landed[sent] = wires.carry(sent.source.stage, sent.target.stage, stop)
    return Timeline(
        spans=tuple(tuple(row) for row in spans),
        total=max(clock),
        busy=tuple(math.fsum(span.stop - span.start for span in row) for row in spans),
        peak_live=tuple(schedule.peak_live(stage) for stage in range(schedule.stages)),
        link_busy=wires.busy,
    )


def _costs(schedule: Schedule, work: Work | Sequence[Sequence[Work]]) -> dict[Place, dict[str, float]]:
    """Seconds of each kind of op on each place."""
    if isinstance(work, Work):
        return dict.fromkeys(schedule.places(), _by_kind(work))
    shape = {len(row) for row in work}
    if len(work) != schedule.stages or shape != {schedule.chunks}:
        raise PlanError(
            f"work for {len(work)} stages with {', '.join(map(str, sorted(shape)))} chunks, "
            f"in a schedule of {schedule.stages} stages with {schedule.chunks}",
            "give one entry for each chunk of each stage",
        )
    return {place: _by_kind(work[place.stage][place.chunk]) for place in schedule.places()}


def _by_kind(work: Work) -> dict[str, float]:
    return {
        "forward": work.forward,
        "backward": work.backward_input + work.backward_weight,
        "backward_input": work.backward_input,
        "backward_weight": work.backward_weight,
    }


def _speeds(
    schedule: Schedule, links: LinkSpeed | Mapping[tuple[int, int], LinkSpeed]
) -> Mapping[tuple[int, int], LinkSpeed]:
    """The speed of every directed link that the schedule uses."""
    up = {(a.stage, b.stage) for a, b in pairwise(schedule.places()) if a.stage != b.stage}
    pairs = sorted(up | {(target, source) for source, target in up})
    if isinstance(links, LinkSpeed):
        return dict.fromkeys(pairs, links)
    missing = next((pair for pair in pairs if pair not in links), None)
    if missing is not None:
        raise PlanError(
            f"the schedule sends from stage {missing[0]} to stage {missing[1]}, and no link between them is given",
            f"it uses {len(pairs)} links, and {len(links)} are given",
        )
    return links


class _Wires:
    """When each directed link is free again. One stage feeds a link, in its own order, so no queue is needed."""

    def __init__(self, speeds: Mapping[tuple[int, int], LinkSpeed], hop_bytes: int) -> None:
        self.speeds = speeds
        self.hop_bytes = hop_bytes
        self.free: dict[tuple[int, int], float] = {}
        self.busy: dict[tuple[int, int], float] = {}

    def carry(self, source: int, target: int, ready: float) -> float:
        """Send what is ready at `ready`; returns when it has landed."""
        if source == target:
            return ready
        pair = (source, target)
        seconds = self.hop_bytes / self.speeds[pair].bandwidth
        self.free[pair] = max(ready, self.free.get(pair, 0.0)) + seconds
        self.busy[pair] = self.busy.get(pair, 0.0) + seconds
        return self.free[pair] + self.speeds[pair].latency
