"""The pipeline simulator: plays a schedule on ideal clocks, and tells when each stage does what and when it waits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tllm.core.errors import PlanError
from tllm.planner.cluster.device import LinkSpeed
from tllm.spec.pipeline_schedule import Kind, Op, Schedule, StageTransfer, play

KINDS: tuple[Kind, ...] = ("forward", "backward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class StageWork:
    """Seconds of one microbatch on one chunk of one stage; a whole backward pass takes both of its halves."""

    forward: float
    backward_input: float
    backward_weight: float

    def __post_init__(self) -> None:
        for seconds in (self.forward, self.backward_input, self.backward_weight):
            if not 0 <= seconds < math.inf:
                raise PlanError(f"work of {seconds} seconds", "give seconds of 0 or more")


class OpSpan(NamedTuple):
    """One op on one stage's clock, in seconds from the start of the step."""

    op: Op
    start: float
    stop: float


@dataclass(frozen=True)
class StepTimeline:
    """What was played. `spans[stage]` in order; `busy[stage]` in seconds; `peak_live[stage]` as `Schedule.peak_live`.

    `link_busy` is, for each directed link between stages that carried anything, the seconds it was sending.
    """

    spans: tuple[tuple[OpSpan, ...], ...]
    total: float
    busy: tuple[float, ...]
    peak_live: tuple[int, ...]
    link_busy: dict[tuple[int, int], float]

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they compute nothing."""
        return 1 - math.fsum(self.busy) / (len(self.busy) * self.total) if self.total else 0.0


class SchedulePlayer:
    """A schedule in an order in which each op's input was played before it, made once to be played on many clocks."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.pairs = _pairs(schedule)
        wires, slots = {pair: number for number, pair in enumerate(self.pairs)}, dict[StageTransfer, int]()
        self.moves: list[_Move] = []
        for stage, op in play(schedule):
            needed, sent = schedule.receives(stage, op), schedule.sends(stage, op)
            self.moves.append(
                _Move(
                    stage,
                    op,
                    (op.chunk * schedule.stages + stage) * len(KINDS) + KINDS.index(op.kind),
                    slots[needed] if needed is not None else -1,
                    slots.setdefault(sent, len(slots)) if sent is not None else -1,
                    wires.get((sent.source.stage, sent.target.stage), -1) if sent is not None else -1,
                )
            )
        self.hops = len(slots)

    def play(
        self,
        work: StageWork | Sequence[Sequence[StageWork]],
        links: LinkSpeed | Mapping[tuple[int, int], LinkSpeed] | None = None,
        hop_bytes: int = 0,
        one_port: Collection[int] = (),
    ) -> StepTimeline:
        """Play it. `work`: one for all places or `work[stage][chunk]`; `links`: one for all or by (source, target).

        A stage starts an op when the one before is done and its input has landed. Links work beside the stages; each
        carries one tensor of `hop_bytes` bytes at a time, in the order sent. All that a stage of `one_port` sends
        leaves by one port, as fast as its fastest link, in the order sent. Without `links` hops take no time.
        """
        schedule = self.schedule
        costs, speeds = _costs(schedule, work), _speeds(self.pairs, LinkSpeed() if links is None else links)
        sending, latency = [hop_bytes / link.rate(hop_bytes) for link in speeds], [link.latency for link in speeds]
        clock, landed = [0.0] * schedule.stages, [0.0] * self.hops
        leaving = [self._leaving(stage, sending) if stage in one_port else 0.0 for stage in range(schedule.stages)]
        free, left, carried = [0.0] * len(speeds), [0.0] * schedule.stages, [0] * len(speeds)
        spans: list[list[OpSpan]] = [[] for _ in range(schedule.stages)]
        for stage, op, cost, needed, sent, wire in self.moves:
            start = clock[stage]
            if needed >= 0 and landed[needed] > start:
                start = landed[needed]
            stop = clock[stage] = start + costs[cost]
            spans[stage].append(OpSpan(op, start, stop))
            if wire >= 0:
                # One stage feeds a port and a wire, in its own order, so no queue is needed.
                left[stage] = (stop if stop > left[stage] else left[stage]) + leaving[stage]
                there = (stop if stop > free[wire] else free[wire]) + sending[wire]
                free[wire] = there if there > left[stage] else left[stage]
                carried[wire] += 1
                landed[sent] = free[wire] + latency[wire]
            elif sent >= 0:
                landed[sent] = stop
        return StepTimeline(
            spans=tuple(map(tuple, spans)),
            total=max(clock),
            busy=tuple(math.fsum(span.stop - span.start for span in row) for row in spans),
            peak_live=tuple(schedule.peak_live(stage) for stage in range(schedule.stages)),
            link_busy={pair: carried[i] * sending[i] for i, pair in enumerate(self.pairs) if carried[i]},
        )

    def _leaving(self, stage: int, sending: Sequence[float]) -> float:
        """Seconds that a tensor takes out of a stage's port, as over the fastest of its wires."""
        wires = zip(self.pairs, sending, strict=True)
        return min((seconds for (source, _), seconds in wires if source == stage), default=0.0)


class _Move(NamedTuple):
    """An op: which cost it has, which tensor it needs and which it makes, and over which wire that goes (-1: none)."""

    stage: int
    op: Op
    cost: int
    needed: int
    sent: int
    wire: int


def _costs(schedule: Schedule, work: StageWork | Sequence[Sequence[StageWork]]) -> list[float]:
    """Seconds of each kind of op on each place, in the order of the model's layers."""
    if isinstance(work, StageWork):
        return _by_kind(work) * (schedule.stages * schedule.chunks)
    shape = {len(row) for row in work}
    if len(work) != schedule.stages or shape != {schedule.chunks}:
        raise PlanError(
            f"work for {len(work)} stages with {', '.join(map(str, sorted(shape)))} chunks, "
            f"in a schedule of {schedule.stages} stages with {schedule.chunks}",
            "give one entry for each chunk of each stage",
        )
    return [seconds for place in schedule.places() for seconds in _by_kind(work[place.stage][place.chunk])]


def _by_kind(work: StageWork) -> list[float]:
    """In the order of KINDS."""
    whole = work.backward_input + work.backward_weight
    return [work.forward, whole, work.backward_input, work.backward_weight]


def _pairs(schedule: Schedule) -> list[tuple[int, int]]:
    """Every directed link that the schedule uses."""
    up = {(a.stage, b.stage) for a, b in pairwise(schedule.places()) if a.stage != b.stage}
    return sorted(up | {(target, source) for source, target in up})


def _speeds(
    pairs: Sequence[tuple[int, int]], links: LinkSpeed | Mapping[tuple[int, int], LinkSpeed]
) -> list[LinkSpeed]:
    """The speed of each."""
    if isinstance(links, LinkSpeed):
        return [links] * len(pairs)
    missing = next((pair for pair in pairs if pair not in links), None)
    if missing is not None:
        raise PlanError(
            f"the schedule sends from stage {missing[0]} to stage {missing[1]}, and no link between them is given",
            f"it uses {len(pairs)} links, and {len(links)} are given",
        )
    return [links[pair] for pair in pairs]
