"""`ReplicaMicrobatches`: how many whole microbatches a replica can do at most in so many seconds (`cut_bound` has the
proof).

A replica is one rank of each stage: ranks of context parallelism count as so many replicas with a part of each
microbatch. Seconds are at least those of the lightest layer on the best device of a class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

MOST_CHUNKS = 4
"""Chunks of a stage that a plan may have at most (`search.training_layouts.CHUNKS`)."""

ROUNDING = 1e-9
"""By so much of itself a number of microbatches may be off."""

Passes = Literal["split", "chunked"]
PASSES: tuple[Passes, ...] = ("split", "chunked")
"""Backward passes in two halves (zero bubble), with which whole ones of a single chunk are never faster in the bound;
those of several chunks (interleaved)."""


@dataclass(frozen=True)
class StepWork:
    """What a step takes with microbatches of one size, in units of one row through the lightest layer, and in bytes."""

    layers: int
    rows: int
    """That are computed, as the last microbatch counts as a full one."""
    part: tuple[float, float]
    """Rows of a microbatch that a replica computes at least, and that count for it: fewer than all where ranks share
    it."""
    ranks: int
    """That share each microbatch (context parallelism)."""
    logits: float
    """What the logits of a row are worth."""
    hides: float
    """Part of a microbatch's time, at most, that the backward pass of the last microbatch takes."""
    kept: float
    """Bytes that a layer keeps of a row at least until its backward pass."""
    weights: float
    """Bytes of a layer's weights."""


@dataclass(frozen=True)
class DeviceClasses:
    """The devices, as the best of their classes."""

    slow_seconds: float
    """Of one row through one layer."""
    fast_seconds: float
    slow_link: float
    """Bytes per second."""
    fast_link: float
    little_memory: float
    """Bytes that are left beside a process."""
    much_memory: float
    holders: tuple[int, ...]
    """How many devices there are: in all, and as FAST, LINKED, FAST_LINKED and LARGE say."""


FAST, LINKED, FAST_LINKED, LARGE = 1, 2, 3, 4
"""Rows of the linear program after the first, which counts all devices: those that are fast, that have a fast link,
both, and that have much memory."""


class CutStage(NamedTuple):
    """A stage of a cut of the layers."""

    load: float
    """In layers, logits included."""
    elements: float
    layers: int


LayerCut = tuple[CutStage, ...]
"""The stages, the smallest load first."""


def most_chunks(cut: LayerCut) -> int:
    """That all stages may have: one layer is in each."""
    return min(MOST_CHUNKS, min(stage.layers for stage in cut)) if len(cut) > 1 else 1


class ZeroStage(NamedTuple):
    """What a ZeRO stage sends, as multiples of a reduce-scatter and of a gather of new weights, and holds."""

    sums: int
    gathers: int
    weights: int
    """Whether a rank holds all weights of its layers."""


class CutMessages(NamedTuple):
    """Seconds of what stages send."""

    sums: tuple[float, ...]
    """By stage: of gradients, of which the last backward pass hides a part, and of new weights."""
    most: float
    """Of the stage that sends longest."""
    most_layers: int
    """Layers of that stage, or of the smallest of several."""
    always: float
    """Of new weights, which nothing hides, on the stage that has most of them for its link."""
    anew: tuple[float, ...]
    """By stage: of a gather of one layer forward and backward, with ZeRO 3."""


class ReplicaKind(NamedTuple):
    """A kind of replicas, by its slow devices."""

    on_fast: int
    """The set of stages that need fast devices."""
    others: int
    """How many more do."""
    stages: tuple[tuple[float, int], ...]
    """What each stage takes for a row at least, the longest first, with its place."""


class ReplicaMicrobatches:
    """What one replica of a kind can do."""

    def __init__(
        self, work: StepWork, devices: DeviceClasses, cut: LayerCut, kind: ReplicaKind, messages: CutMessages
    ) -> None:
        self.work, self.devices, self.cut, self.kind, self.messages = work, devices, cut, kind, messages

    def most(self, seconds: float, passes: Passes, zero: ZeroStage, large: int) -> tuple[int, bool]:
        """The most microbatches with so many devices of much memory, and whether more of these would allow more."""
        rows, stages = self.work.part[0], len(self.cut)
        if rows > self._largest_microbatch(zero, large) * (1 + ROUNDING):
            return 0, True
        if passes == "split":
            freely = whole(self._counts(seconds, passes, 1.0))
            count = whole([freely, self._in_flight(seconds, zero, large) / rows**2])
            return count, count < freely
        # A microbatch passes each chunk in a group of as many as there are stages, or of all. One layer is of another.
        all_but_one = 1 - 1 / self.cut[-1].load
        freely = whole(self._counts(seconds, passes, all_but_one))
        first = min(all_but_one, self._of_first_chunk(zero, large) / stages / rows)
        count = freely if first == all_but_one else whole(self._counts(seconds, passes, first))
        return max(count, min(freely, stages - 1)), count < freely

    def _largest_microbatch(self, zero: ZeroStage, large: int) -> float:
        """Rows of the largest microbatch that stages have room for where so many are on devices with much memory: at
        best those with the most layers."""
        layers = sorted((stage.layers for stage in self.cut), reverse=True)
        devices, limit = self.devices, math.inf
        for memory, most in ((devices.much_memory, layers[0]), (devices.little_memory, [*layers, 0][large])):
            kept = most * self.work.kept
            limit = min(limit, self._left(memory, most, zero) / kept) if kept else limit
        return limit

    def _of_first_chunk(self, zero: ZeroStage, large: int) -> float:
        """Rows of microbatches, as parts of the stage that sends most, that it has room for before its first backward
        pass."""
        layers = self.messages.most_layers
        kept = layers * self.work.kept
        memory = self.devices.much_memory if large else self.devices.little_memory
        return self._left(memory, layers, zero) / kept if kept else math.inf

    def _left(self, memory: float, layers: int, zero: ZeroStage) -> float:
        """Bytes beside the weights of so many layers."""
        return max(0.0, memory - zero.weights * layers * self.work.weights)

    def _in_flight(self, seconds: float, zero: ZeroStage, large: int) -> float:
        """What the rows of a replica times those of a microbatch may come to, by Little's law: of i stages with a or
        more layers the first keeps a microbatch from its forward pass until all later stages have passed it on, and
        until its own gradients are done. So do i stages on devices with little memory, of which `large` others may
        have more layers."""
        if not self.work.kept:
            return math.inf
        cut = self.cut
        times, least = {place: time for time, place in self.kind.stages}, math.inf
        order, shortest = sorted(range(len(cut)), key=lambda place: -cut[place].layers), math.inf
        for count, place in enumerate(order, 1):
            shortest, layers = min(shortest, times[place]), cut[place].layers
            if count < len(cut) and cut[order[count]].layers == layers:
                continue
            for memory, stages in ((self.devices.much_memory, count), (self.devices.little_memory, count - large)):
                if stages > 0:
                    kept = layers * self.work.kept * shortest * (2 * stages + 1) / 3
                    least = min(least, seconds * self._left(memory, layers, zero) / kept)
        return least

    def _counts(self, seconds: float, passes: Passes, first: float) -> list[float]:
        """How many microbatches each of several limits allows. `first`: the part of a stage's work that its first chunk
        has at most, whose backward pass is the last."""
        cut, kind, messages, is_chunked = self.cut, self.kind, self.messages, passes == "chunked"
        chunks = most_chunks(cut) if is_chunked else 1
        hides, longest = self.work.hides * first, kind.stages[0][0]
        anew = zip(cut, messages.anew, strict=False)
        gathers = max((max(0, stage.layers - chunks) * of_one for stage, of_one in anew), default=0.0)
        counts = [seconds / gathers] if gathers else []
        largest = second = 0.0
        for before, (time, place) in enumerate(kind.stages):
            sums = messages.sums[place]
            largest, second = max(largest, sums), max(second, min(largest, sums))
            if before + 1 < len(cut) and kind.stages[before + 1][0] == time:
                continue
            # In parts of a microbatch on this stage: a third of it, or one layer of each first chunk, both ways.
            fill = before * self.devices.fast_seconds / time if is_chunked else before / 3
            freely = self._in(seconds - messages.most, time) + hides * longest / time
            counts.append(freely - fill * sure_fill(hides, freely - fill))
            counts.append(self._in(seconds - messages.always, time) - fill)
            if is_chunked and before:
                # The last of these stages is done before the last backward passes of the others begin.
                counts.append(self._in(seconds - second, time) - fill * (before - 1) / before)
        return counts

    def _in(self, seconds: float, of_row: float) -> float:
        """How many microbatches of which a row takes so long may be done in so many seconds."""
        return seconds / of_row / self.work.part[0]


def sure_fill(hides: float, count: float) -> float:
    """The part of a pipeline's fill that counts for sure, where with all of it so many microbatches can be done.

    Gradients may be those of another stage, which takes longer than any is known to: its device is slower than the best
    of its class, or its ranks wait. If m of its microbatches take as long as the fill and the work of the stage that is
    looked at, its last backward pass hides `hides` / m of both. Where m is no more than `count`, all of the fill may
    count."""
    return max(0.0, 1 - hides / count) if count > 0 else 0.0


def whole(counts: Sequence[float]) -> int:
    """The least of these, in whole microbatches."""
    count = min(counts)
    return max(0, math.floor(count * (1 + ROUNDING))) if count > 0 else 0
