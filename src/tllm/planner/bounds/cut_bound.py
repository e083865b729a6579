"""`least_of_cuts`: what a step takes at least where each layer is computed by one stage, which sums its gradients.

The relaxation of `training_bound` spreads any part of a layer over all devices. Without tensor parallelism no plan does
that: all replicas of a plan have the same cut of the layers into stages. This bound goes through every cut (their order
along the pipeline does not count) and lets devices be arranged as well as can be. It says of each plan, in plain words:

1. **Whole layers.** A stage of a layers is busy for m a t seconds in a step of m rows, if t is what a layer takes for a
   row. So a replica does no more rows than its slowest stage lets through.
2. **The pipeline's fill.** Of i stages that take w or more for a microbatch the last one begins when it has passed the
   i - 1 others, (i - 1) w / 3 late: a third of w is the forward pass. Where backward passes are whole, as many of them
   follow its last one, so that it is (i - 1) w. With several chunks only one layer of each first chunk is sure to come
   before and after.
3. **Gradients.** A rank sends its stage's gradients once, after its last backward pass has begun, and then the new
   weights. Of n ranks that share a gradient each sends the part (n - 1) / n; how many there are at least follows from
   the seconds and the fastest replica. That pass takes no more than three quarters of a microbatch: two thirds, or up
   to three quarters where ranks of context parallelism wait for one another. Where backward passes are whole, a stage's
   last one comes after the last work of every later stage. So of i stages that take w or more the last in the pipeline
   is done before what hides the gradients of the others begins: m w seconds, and then the messages of at least the
   second most of the i.
4. **ZeRO 3** gathers the weights of all layers but one of each chunk anew for each forward and each backward pass.
5. **Memory** limits the microbatch, and so what a last backward pass hides. Before its first one a stage holds what its
   layers keep of one microbatch, or the first of its chunks of as many as there are stages. And it holds a microbatch
   from its forward pass until all later stages are done with it (Little 1961, A Proof for the Queuing Formula), for
   as many seconds as their layers take.
6. **Devices.** A stage whose gradients take too long for slow links has a device with a fast one in each replica, and
   one whose load is too large for slow devices a fast one. How many replicas there can be of each kind is a linear
   program: there are no more devices than there are, nor fast ones, well-linked ones, those that are both, and those
   with much memory.

Devices count as slow or fast, with slow or fast links, with little memory or much: each as the best of its class. Ranks
of context parallelism count as so many replicas with a part of each microbatch, of which all of the above is as true.
Each kind of replicas may have the size of microbatches that suits it, and any part of a replica counts. The embedding,
of which it is not known which stage has it, has no gradients. So no plan of the forms that are searched
(`training_bound.is_searched`) takes less, whatever its schedule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, islice, pairwise, product
from typing import Literal, NamedTuple

from tllm.planner.bounds.linear_program import most_of

MOST_CUTS = 10_000
"""Cuts, as sums of layers, that are gone through: some seconds. 32 layers have 8,349, 36 have 17,977."""

MOST_CHUNKS = 4
"""Chunks of a stage that a plan may have at most (`search.training_layouts.CHUNKS`)."""

HALVINGS = 20
"""Steps of a bisection for seconds."""

FAST, LINKED, FAST_LINKED, LARGE = 1, 2, 3, 4
"""Rows of the linear program after the first, which counts all devices: those that are fast, that have a fast link,
both, and that have much memory."""

Passes = Literal["split", "whole", "chunked"]
PASSES: tuple[Passes, ...] = ("split", "whole", "chunked")
"""Backward passes in two halves (zero bubble); whole ones (1F1B, GPipe); those of several chunks (interleaved)."""

MOST_STEPS = 5
"""Ranges of how many devices of a replica have much memory: each counts with its most memory and its fewest devices."""

MOST_SUBSETS = 32
"""Sets of stages with fast links that are looked at for a cut; where there are more, all links are taken to be fast."""

KNOWN = 3
"""Stages on slow devices, those with the largest loads, that are looked at one by one: behind three the pipeline's fill
takes as long as the last backward pass hides."""


@dataclass(frozen=True)
class StepWork:
    """What the rows of a step take, in units of one row through the lightest layer, and in bytes."""

    layers: int
    rows: int
    most_rows: int
    """Of the largest microbatch."""
    logits: float
    """What the logits of a row are worth."""
    hides: float
    """Part of a microbatch's time, at most, that the backward pass of the last microbatch takes."""
    kept: float
    """Bytes that a layer keeps of a row at least until its backward pass."""
    weights: float
    """Bytes of a layer's weights."""


@dataclass(frozen=True)
class SentGradients:
    """Elements that stages learn, and the bytes that are sent for each of them; all 0 where nothing is exposed."""

    layer: float
    last: float
    """More of the last stage."""
    lost: float
    """As many, at most, that a stage does not send as messages are whole numbers of elements."""
    summed: float
    """Bytes of an element's gradient, reduce-scattered."""
    gathered: float
    """Bytes of a new weight."""


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


class _Zero(NamedTuple):
    """What a ZeRO stage sends, as multiples of a reduce-scatter and of a gather of new weights, and holds."""

    sums: int
    gathers: int
    weights: int
    """Whether a rank holds all weights of its layers."""


ZEROS = (_Zero(2, 0, 1), _Zero(1, 1, 1), _Zero(1, 0, 0))
"""ZeRO 0; 1 and 2; 3, whose gathers go on beside products."""

FREE = ZEROS[-1]


class _Stage(NamedTuple):
    load: float
    """In layers, logits included."""
    elements: float
    layers: int


_Cut = tuple[_Stage, ...]
"""The stages, the smallest load first."""


class _Messages(NamedTuple):
    """Seconds of what stages send, by stage."""

    sums: tuple[float, ...]
    """Of gradients, of which the last backward pass hides a part, and of new weights."""
    always: float
    """Of new weights, which nothing hides, on the stage that has most of them for its link."""
    anew: tuple[float, ...]
    """Of a gather of all layers, with ZeRO 3."""


class _Kind(NamedTuple):
    """A kind of replicas, by its slow devices."""

    on_fast: int
    """The set of stages that need fast devices."""
    others: int
    """How many more do."""
    stages: tuple[tuple[float, int], ...]
    """What each stage takes for a row at least, the longest first, with its place."""


def least_of_cuts(work: StepWork, sent: SentGradients, devices: DeviceClasses, least: float) -> float:
    """Seconds that plans take at least that are searched and have no tensor parallelism; `least` are known already, and
    are the answer for a model with too many cuts."""
    most = min(work.layers, devices.holders[0])
    return least if _ways(work.layers, most) > MOST_CUTS else _CutBound(work, sent, devices).seconds(least)


class _CutBound:
    """The bound of one step on given devices."""

    def __init__(self, work: StepWork, sent: SentGradients, devices: DeviceClasses) -> None:
        self.work, self.sent, self.devices = work, sent, devices

    def seconds(self, least: float) -> float:
        """The least seconds of any cut: each is asked whether it can be faster than the best one before."""
        best = math.inf
        for parts in _even_first(self.work.layers, self.devices.holders[0]):
            for last in sorted(set(parts)):
                cut = self._cut(parts, last)
                if best > least and (best == math.inf or self._suffices(cut, best)):
                    best = self._least_of(cut, least, best)
        return best

    def _least_of(self, cut: _Cut, low: float, high: float) -> float:
        """The most seconds, up to rounding, that do not suffice for a cut; `low` if they do."""
        if self._suffices(cut, low):
            return low
        if high == math.inf:
            high = 2 * low
            while not self._suffices(cut, high):
                low, high = high, 2 * high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._suffices(cut, middle) else (middle, high)
        return low

    def _cut(self, parts: Sequence[int], last: int) -> _Cut:
        """Stages of so many layers, of which the last has `last`."""
        rest, sent = list(parts), self.sent
        rest.remove(last)
        end = _Stage(last + self.work.logits, last * sent.layer + sent.last, last)
        return tuple(sorted([*(_Stage(float(part), part * sent.layer, part) for part in rest), end]))

    def _suffices(self, cut: _Cut, seconds: float) -> bool:
        """Whether all rows may be done in so many seconds."""
        rows, devices = self.work.rows, self.devices
        largest = cut[-1].load
        levels = [0.0, *dict.fromkeys(stage.load for stage in cut)]
        freely = [seconds / max(level * devices.slow_seconds, largest * devices.fast_seconds) for level in levels]
        needs = [(sum(stage.load > level for stage in cut), len(cut)) for level in levels]
        if _most_of_two(freely, needs, (devices.holders[FAST], devices.holders[0])) < rows:
            return False
        replicas = max(1, math.ceil(rows / freely[0] * (1 - 1e-9)))
        if replicas * len(cut) > devices.holders[0]:
            return False
        whole = (1 << len(cut)) - 1
        at_best = self._messages(cut, whole, FREE, replicas)._replace(anew=())
        if self._most_rows(cut, 0, FREE, at_best, seconds, 1) < rows:
            return False  # not even if all had fast links and much memory
        subsets = list(islice(_subsets(cut, devices.holders[LINKED] // replicas), MOST_SUBSETS + 1))
        if len(subsets) > MOST_SUBSETS:
            return True
        for on_links in subsets:
            messages = [self._messages(cut, on_links, zero, replicas) for zero in ZEROS]
            if self._most_rows(cut, on_links, FREE, messages[-1]._replace(anew=()), seconds) < rows:
                continue  # no ZeRO stage sends or holds less
            for zero, sent in zip(ZEROS, messages, strict=True):
                if self._most_rows(cut, on_links, zero, sent, seconds) >= rows:
                    return True
        return False

    def _messages(self, cut: _Cut, on_links: int, zero: _Zero, replicas: int) -> _Messages:
        """Of a cut where these stages have fast links."""
        sent, part = self.sent, (replicas - 1) / replicas
        links = [
            self.devices.fast_link if on_links >> place & 1 else self.devices.slow_link for place in range(len(cut))
        ]
        sums = [max(0.0, part * stage.elements - sent.lost) / link for stage, link in zip(cut, links, strict=True)]
        anew = [2 * part * sent.layer * sent.gathered / link * (not zero.weights) for link in links]
        each = zero.sums * sent.summed + zero.gathers * sent.gathered
        return _Messages(tuple(each * one for one in sums), zero.gathers * sent.gathered * max(sums), tuple(anew))

    def _most_rows(
        self, cut: _Cut, on_links: int, zero: _Zero, messages: _Messages, seconds: float, steps: int = MOST_STEPS
    ) -> float:
        """All rows that replicas may do at most: the linear program over how many there are of each kind."""
        best, kinds = 0.0, list(self._kinds(cut, messages.sums))
        for passes in PASSES if self.work.layers >= 2 * len(cut) > 2 else PASSES[:2]:
            values, demands = list[float](), list[list[float]]()
            for kind in kinds:
                replica = _Replica(self.work, self.devices, cut, kind, messages)
                on_fast = kind.on_fast.bit_count() + kind.others
                on_both = (kind.on_fast & on_links).bit_count()
                for large, below in pairwise(_steps(len(cut) + 1, steps)):
                    rows, is_limited = replica.rows(seconds, passes, zero, below - 1)
                    values.append(rows)
                    demands.append([len(cut), on_fast, on_links.bit_count(), on_both, large])
                    if not is_limited:
                        break  # more memory is of no use
            best = max(best, most_of(values, demands, self.devices.holders))
        return best

    def _kinds(self, cut: _Cut, sums: Sequence[float]) -> Iterator[_Kind]:
        """Kinds by the KNOWN largest loads on slow devices, or all of these if they are fewer. Of stages alike those
        that send least are taken; stages with no larger load than all of these may be on any device."""
        slow, fast, places = self.devices.slow_seconds, self.devices.fast_seconds, range(len(cut))
        alike = {load: [place for place in places if cut[place].load == load] for load in {one.load for one in cut}}
        for members in alike.values():
            members.sort(key=sums.__getitem__)
        for known in range(min(KNOWN, len(cut)) + 1):
            for loads in combinations_with_replacement(sorted(alike, reverse=True), known):
                taken = Counter(loads)
                if any(count > len(alike[load]) for load, count in taken.items()):
                    continue
                free = loads[-1] if known == KNOWN else -1.0
                on_slow = {place for load, count in taken.items() for place in alike[load][:count]}
                times = [(stage.load * (slow if place in on_slow else fast), place) for place, stage in enumerate(cut)]
                on_fast = sum(1 << place for place in places if cut[place].load > free and cut[place].load not in taken)
                others = sum(len(alike[load]) - count for load, count in taken.items() if load > free)
                yield _Kind(on_fast, others, tuple(sorted(times, reverse=True)))


class _Replica:
    """What one replica of a kind can do."""

    def __init__(self, work: StepWork, devices: DeviceClasses, cut: _Cut, kind: _Kind, messages: _Messages) -> None:
        self.work, self.devices, self.cut, self.kind, self.messages = work, devices, cut, kind, messages

    def rows(self, seconds: float, passes: Passes, zero: _Zero, large: int) -> tuple[float, bool]:
        """The most rows with so many devices of much memory, and whether more of these would allow more."""
        limit, stages = self._largest_microbatch(zero, large), len(self.cut)
        if passes == "chunked":
            # A microbatch passes each chunk in a group of as many as there are stages, or of all.
            lines = self._lines(seconds, passes, 1.0, limit)
            rows, is_limited = _rows_of(lines, min(limit, self._of_first_chunk(zero, large) / stages), math.inf)
            few = min(_rows_of(lines, limit, math.inf)[0], (stages - 1) * limit)
            return max(rows, few), is_limited or few > rows
        sure = self._sure_fill(self._lines(seconds, passes, 1.0, limit), limit)
        return _rows_of(self._lines(seconds, passes, sure, limit), limit, self._in_flight(seconds, zero, large))

    def _largest_microbatch(self, zero: _Zero, large: int) -> float:
        """Rows of the largest microbatch that stages have room for where so many are on devices with much memory: at
        best those with the most layers."""
        layers = sorted((stage.layers for stage in self.cut), reverse=True)
        devices, limit = self.devices, float(self.work.most_rows)
        for memory, most in ((devices.much_memory, layers[0]), (devices.little_memory, [*layers, 0][large])):
            kept = most * self.work.kept
            limit = min(limit, self._left(memory, most, zero) / kept) if kept else limit
        return limit

    def _of_first_chunk(self, zero: _Zero, large: int) -> float:
        """Rows of microbatches, as parts of the stage that sends most, that it has room for before its first backward
        pass."""
        place = max(range(len(self.cut)), key=lambda place: (self.messages.sums[place], -self.cut[place].layers))
        layers, kept = self.cut[place].layers, self.cut[place].layers * self.work.kept
        memory = self.devices.much_memory if large else self.devices.little_memory
        return self._left(memory, layers, zero) / kept if kept else math.inf

    def _left(self, memory: float, layers: int, zero: _Zero) -> float:
        """Bytes beside the weights of so many layers."""
        return max(0.0, memory - zero.weights * layers * self.work.weights)

    def _in_flight(self, seconds: float, zero: _Zero, large: int) -> float:
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

    def _sure_fill(self, lines: Sequence[tuple[float, float]], limit: float) -> float:
        """The part of the fill that counts even where ranks of context parallelism wait for one another. With m
        microbatches a stage that waits so long that m of its own take as long as fill and work of another hides up to
        3 / (4 m) of both. m is at least what the lines with all of the fill allow, over the largest microbatch."""
        rows = min(min(start, start + slope * limit) for start, slope in lines if start)
        return max(0.0, 1 - self.work.hides * limit / rows) if rows > 0 else 0.0

    def _lines(self, seconds: float, passes: Passes, sure: float, limit: float) -> list[tuple[float, float]]:
        """What limits the rows of a replica, each as a line over the rows of a microbatch, or of that part of it which
        the first of several chunks takes. `sure`: the part of the fill that counts; `limit`: rows of the largest
        microbatch."""
        cut, kind, messages = self.cut, self.kind, self.messages
        chunks = min(MOST_CHUNKS, self.work.layers // len(cut)) if passes == "chunked" else 1
        longest, most, hides = kind.stages[0][0], max(messages.sums), self.work.hides
        lines = [((seconds - most) / longest, hides), ((seconds - messages.always) / longest, 0.0)]
        gathered = zip(cut, messages.anew, strict=False)
        gathers = max((max(0, stage.layers - chunks) * anew for stage, anew in gathered), default=0.0)
        if gathers:
            each = seconds / gathers
            lines.append((each * limit, 0.0) if passes == "chunked" else (0.0, each))
        first = second = 0.0
        for before, (time, place) in enumerate(kind.stages):
            first, second = max(first, messages.sums[place]), max(second, min(first, messages.sums[place]))
            if before + 1 < len(cut) and kind.stages[before + 1][0] == time:
                continue
            fill = before / 3 if passes == "split" else before
            if passes != "chunked":
                lines.append(((seconds - most) / time, hides * longest / time - sure * fill))
                lines.append(((seconds - messages.always) / time, -fill))
            if passes != "split":
                lines.append(((seconds - second) / time, -max(0, before - 1) * self.devices.fast_seconds / time))
        return lines


def _steps(whole: int, steps: int) -> list[int]:
    """About so many steps from 0 to `whole`."""
    return sorted({whole * step // steps for step in range(steps + 1)})


def _subsets(cut: _Cut, most: int) -> Iterator[int]:
    """Sets of up to so many stages; of stages that are alike the first ones are taken."""
    alike = [[place for place, other in enumerate(cut) if other == one] for one in dict.fromkeys(cut)]
    for counts in product(*(range(min(len(members), most) + 1) for members in alike)):
        if sum(counts) <= most:
            chosen = (place for members, count in zip(alike, counts, strict=True) for place in members[:count])
            yield sum(1 << place for place in chosen)


def _most_of_two(values: Sequence[float], needs: Sequence[tuple[int, int]], supplies: tuple[int, int]) -> float:
    """`most_of` for two rows, at its corners: one unknown alone, or two that use up both."""
    best = 0.0
    for place, (value, (a, b)) in enumerate(zip(values, needs, strict=True)):
        best = max(best, value * min(supplies[0] / a if a else math.inf, supplies[1] / b))
        for other, (c, d) in zip(values[:place], needs[:place], strict=True):
            whole = a * d - c * b
            if whole:
                x, y = (supplies[0] * d - c * supplies[1]) / whole, (a * supplies[1] - b * supplies[0]) / whole
                if x >= 0 and y >= 0:
                    best = max(best, x * value + y * other)
    return best


def _rows_of(lines: Sequence[tuple[float, float]], limit: float, in_flight: float) -> tuple[float, bool]:
    """The most rows that lines over the rows of a microbatch allow up to a `limit`, if both multiplied are no more than
    `in_flight`; and whether more would be possible with less strict limits."""
    rows, at = _highest(lines, limit)
    if rows * at <= in_flight:
        return max(0.0, rows), at >= limit
    low, high = 0.0, at
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if min(start + slope * middle for start, slope in lines) * middle <= in_flight:
            low = middle
        else:
            high = middle
    return max(0.0, min(start + slope * high for start, slope in lines)), True


def _highest(lines: Sequence[tuple[float, float]], limit: float) -> tuple[float, float]:
    """The greatest value that the least of lines (value at 0, slope) has between 0 and `limit`, and where."""
    at = 0.0
    height, slope = min(lines)
    while slope > 0 and at < limit:
        meets = [((start - height + slope * at) / (slope - other), other) for start, other in lines if other < slope]
        ahead, following = min(meets, default=(limit, 0.0))
        if ahead >= limit:
            return height + slope * (limit - at), limit
        height, at, slope = height + slope * max(0.0, ahead - at), max(at, ahead), following
    return height, at


def _even_first(layers: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `layers` as a sum, of no more parts than devices; even ones come first, as they are good."""
    most = min(layers, devices)
    for parts in range(1, most + 1):
        yield tuple((layers + place) // parts for place in range(parts))
    for cut in _sums(layers, layers, most):
        if cut[0] - cut[-1] > 1:
            yield cut


def _ways(layers: int, parts: int) -> int:
    """How many ways there are to write `layers` as a sum of at most so many parts: as many as with no part above."""
    ways = [1] + [0] * layers
    for part in range(1, parts + 1):
        for whole in range(part, layers + 1):
            ways[whole] += ways[whole - part]
    return ways[layers]


def _sums(whole: int, largest: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Sums of at most so many parts, none above the largest, the largest first."""
    if not whole:
        yield ()
    elif parts:
        for part in range(min(whole, largest), -(-whole // parts) - 1, -1):
            for rest in _sums(whole - part, part, parts - 1):
                yield (part, *rest)
