"""`least_of_cuts`: what a step takes at least where each layer is computed by one stage, which sums its gradients.

The relaxation of `training_bound` spreads any part of a layer over all devices. Without tensor parallelism no plan does
that: all replicas of a plan have the same cut of the layers into stages, and microbatches of one size. This bound goes
through every cut (their order along the pipeline does not count) with every size, and lets devices be arranged as well
as can be. It says of each plan, in plain words:

1. **Whole layers.** A stage of a layers is busy for m a t seconds with m microbatches, if t is what a layer takes for
   one of them. So a replica does no more microbatches than its slowest stage lets through.
2. **Whole microbatches and replicas.** A replica does a whole number of microbatches, the last of which is computed as
   a full one. There are no more replicas than devices for all of their stages, and ranks that share microbatches all
   have such stages.
3. **The pipeline's fill.** Of i stages that take w or more for a microbatch the last one begins when it has passed the
   i - 1 others, (i - 1) w / 3 late: a third of w is the forward pass. Where backward passes are whole, as many of them
   follow its last one, so that it is (i - 1) w. With several chunks only one layer of each first chunk is sure to come
   before and after.
4. **Gradients.** A rank sends its stage's gradients once, after its last backward pass has begun, and then the new
   weights. Of n ranks that share a gradient each sends the part (n - 1) / n; how many there are at least follows from
   the seconds and the fastest replica. That pass takes no more than two thirds of a microbatch, or up to three quarters
   where ranks of context parallelism wait for one another; with several chunks it is that of the first chunk alone.
   Where backward passes are whole, a stage's last one comes after the last work of every later stage. So of i stages
   that take w or more the last in the pipeline is done before what hides the gradients of the others begins: m w
   seconds, and then the messages of at least the second most of the i.
5. **ZeRO 3** gathers the weights of all layers but one of each chunk anew for each forward and each backward pass.
6. **Memory** has room for one microbatch. Before its first backward pass a stage holds what its layers keep of one
   microbatch, or the first of its chunks of as many as there are stages. And it holds a microbatch from its forward
   pass until all later stages are done with it (Little 1961, A Proof for the Queuing Formula), for as many seconds as
   their layers take.
7. **Devices.** A stage whose gradients take too long for slow links has a device with a fast one in each replica, and
   one whose load is too large for slow devices a fast one. How many replicas there can be of each kind is a linear
   program: there are no more devices than there are, nor fast ones, well-linked ones, those that are both, and those
   with much memory. As replicas are whole, no more of them have f or more fast devices than there are for that, and so
   on.

Devices count as slow or fast, with slow or fast links, with little memory or much: each as the best of its class. Ranks
of context parallelism count as so many replicas with a part of each microbatch, of which all of the above is as true.
The embedding, of which it is not known which stage has it, has no gradients. So no plan
of the forms that are searched (`training_bound.is_bounded`) takes less, whatever its schedule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations_with_replacement, islice, pairwise, product
from typing import NamedTuple

from tllm.planner.bounds.layer_sums import even, uneven, ways
from tllm.planner.bounds.linear_program import most_of, with_whole_numbers
from tllm.planner.bounds.replica_microbatches import (
    FAST,
    LINKED,
    PASSES,
    ROUNDING,
    CutMessages,
    CutStage,
    DeviceClasses,
    LayerCut,
    ReplicaKind,
    ReplicaMicrobatches,
    StepWork,
    ZeroStage,
    most_chunks,
    sure_fill,
    whole,
)

MOST_CUTS = 10_000
"""Cuts, as sums of layers, that are gone through: some seconds. 32 layers have 8,349, 36 have 17,977."""

HALVINGS, FEW_HALVINGS = 20, 8
"""Steps of a bisection for seconds, and of a first one, whose steps are fast."""

MOST_STEPS = 5
"""Ranges of how many devices of a replica have much memory: each counts with its most memory and its fewest devices."""

MOST_SUBSETS = 1000
"""Sets of stages with fast links that are looked at for a cut; where there are more, the largest stages have them."""

KNOWN = 3
"""Stages on slow devices, those with the largest loads, that are looked at one by one: behind three the pipeline's fill
takes as long as the last backward pass hides."""


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


class SizedStep(NamedTuple):
    """A step with microbatches of one size, and the devices as they compute such."""

    work: StepWork
    devices: DeviceClasses


ZEROS = (ZeroStage(2, 0, 1), ZeroStage(1, 1, 1), ZeroStage(1, 0, 0))
"""ZeRO 0; 1 and 2; 3, whose gathers go on beside products."""


def least_of_cuts(sizes: Sequence[SizedStep], sent: SentGradients, least: float, most: float) -> float:
    """Seconds that plans take at least that are searched and have no tensor parallelism, with microbatches of one of
    these sizes, or `most` if that is less; `least` are known already, and are the answer for a model with too many
    cuts."""
    layers, devices = sizes[0].work.layers, sizes[0].devices.holders[0]
    if ways(layers, min(layers, devices)) > MOST_CUTS:
        return least
    bounds, freest, best = [_CutBound(size, sent) for size in sizes], _CutBound(_freest(sizes), sent), most
    # Even cuts first, the promising ones of them before the others, so that most others need not be looked at.
    promising = [(bound, bound.cut(*ends)) for ends in _ends(even(layers, devices)) for bound in bounds]
    for bound, cut in sorted(promising, key=lambda one: one[0].at_least(one[1], least, most)):
        best = bound.least_of(cut, least, best)
    for parts in uneven(layers, devices):
        if max(least, freest.by_speed(freest.without_logits(parts))) < best:
            for ends in _ends([parts]):
                if freest.by_speed(freest.cut(*ends)) < best:
                    for bound in bounds:
                        best = bound.least_of(bound.cut(*ends), least, best)
    return best


def _ends(cuts: Iterable[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Each cut with each number of layers that its last stage may have."""
    for parts in cuts:
        for last in sorted(set(parts)):
            yield parts, last


def _freest(sizes: Sequence[SizedStep]) -> SizedStep:
    """No size of microbatches takes less for a row than this one."""
    works, devices = [size.work for size in sizes], [size.devices for size in sizes]
    fast = max(one.holders[FAST] for one in devices)
    rows, logits = min(work.rows for work in works), min(work.logits for work in works)
    slow_seconds, fast_seconds = min(one.slow_seconds for one in devices), min(one.fast_seconds for one in devices)
    holders = (devices[0].holders[0], fast, *devices[0].holders[FAST + 1 :])
    return SizedStep(
        replace(works[0], rows=rows, ranks=1, logits=logits),
        replace(devices[0], slow_seconds=slow_seconds, fast_seconds=fast_seconds, holders=holders),
    )


class _CutBound:
    """The bound of a step with microbatches of one size."""

    def __init__(self, size: SizedStep, sent: SentGradients) -> None:
        self.work, self.sent, self.devices = size.work, sent, size.devices

    def by_speed(self, cut: LayerCut) -> float:
        """Seconds of a step's products on replicas that are whole, where each is as slow as its slowest stage."""
        slow, fast, largest = self.devices.slow_seconds, self.devices.fast_seconds, cut[-1].load
        levels, needs = _levels(cut)
        rows = [1 / max(level * slow, largest * fast) for level in levels]
        most = _most_of_two(rows, needs, (self.devices.holders[FAST], self._whole_replicas(cut) * len(cut)))
        return self.work.rows / most * (1 - ROUNDING)

    def at_least(self, cut: LayerCut, low: float, high: float) -> float:
        """Seconds between these that a cut takes at least by its products and messages alone."""
        if not self._may_suffice(cut, high):
            return high
        for _ in range(FEW_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._may_suffice(cut, middle) else (middle, high)
        return low

    def least_of(self, cut: LayerCut, low: float, high: float) -> float:
        """The most seconds, up to rounding, that do not suffice for a cut; `low` if they do, `high` if no fewer do."""
        if not self._suffices(cut, high):
            return high
        low = self.at_least(cut, low, high)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._suffices(cut, middle) else (middle, high)
        return low

    def cut(self, parts: Sequence[int], last: int) -> LayerCut:
        """Stages of so many layers, of which the last has `last`."""
        rest, sent = list(parts), self.sent
        rest.remove(last)
        end = CutStage(last + self.work.logits, last * sent.layer + sent.last, last)
        return tuple(sorted([*(CutStage(float(part), part * sent.layer, part) for part in rest), end]))

    def without_logits(self, parts: Sequence[int]) -> LayerCut:
        """Stages of so many layers."""
        return tuple(CutStage(float(part), 0.0, part) for part in sorted(parts))

    def _may_suffice(self, cut: LayerCut, seconds: float) -> bool:
        """Whether they may be enough for products and messages, if the largest stages have the fast links."""
        replicas = self._least_replicas(cut, seconds)
        return replicas <= self._whole_replicas(cut) and any(
            self._is_in_time(cut, self._best_messages(cut, zero, replicas), seconds) for zero in ZEROS
        )

    def _is_in_time(self, cut: LayerCut, messages: CutMessages, seconds: float) -> bool:
        """The same of given messages: replicas are as slow as their slowest stage, and those that are as slow fill."""
        slow, fast, largest = self.devices.slow_seconds, self.devices.fast_seconds, cut[-1].load
        (levels, needs), part, work = _levels(cut), self.work.part, self.work
        alike = len(cut) - sum(stage.load < largest for stage in cut)
        chunks = most_chunks(cut)
        anew = max(max(0, one.layers - chunks) * of_one for one, of_one in zip(cut, messages.anew, strict=True))
        gathered = seconds / anew if anew else math.inf
        rows = list[float]()
        for level in levels:
            time = max(level * slow, largest * fast)
            filled = 0 if level * slow > largest * fast else alike - 1
            fill = filled * (min(1 / 3, fast / time) if chunks > 1 else 1 / 3)
            freely = (seconds - messages.most) / time / part[0] + work.hides
            hidden = freely - fill * sure_fill(work.hides, freely - fill)
            rows.append(whole([hidden, (seconds - messages.always) / time / part[0] - fill, gathered]) * part[1])
        supplies = (self.devices.holders[FAST], self._whole_replicas(cut) * len(cut))
        return _most_of_two(rows, needs, supplies) * (1 + ROUNDING) >= work.rows

    def _suffices(self, cut: LayerCut, seconds: float) -> bool:
        """Whether all rows may be done in so many seconds."""
        if not self._may_suffice(cut, seconds):
            return False
        rows, replicas = self.work.rows, self._least_replicas(cut, seconds)
        at_best = [self._best_messages(cut, zero, replicas) for zero in ZEROS]
        zeros = [
            zero
            for zero, best in zip(ZEROS, at_best, strict=True)
            if self._is_in_time(cut, best, seconds) and self._most_rows(cut, 0, zero, best, seconds, 1) >= rows
        ]
        if not zeros:
            return False  # not even if the largest stages had the fast links, and all had much memory
        subsets = list(islice(_subsets(cut, self.devices.holders[LINKED] // replicas), MOST_SUBSETS + 1))
        if len(subsets) > MOST_SUBSETS:
            return True
        for on_links, zero in product(subsets, zeros):
            messages = self._messages(cut, on_links, zero, replicas)
            is_in_time = self._is_in_time(cut, messages, seconds)
            if is_in_time and self._most_rows(cut, on_links, zero, messages, seconds) >= rows:
                return True
        return False

    def _least_replicas(self, cut: LayerCut, seconds: float) -> int:
        """As the fastest one has no more rows than its slowest stage lets through on fast devices."""
        computed, counted = self.work.part
        of_one = whole([seconds / (cut[-1].load * self.devices.fast_seconds * computed)]) * counted
        return math.ceil(self.work.rows / of_one * (1 - ROUNDING)) if of_one else self.devices.holders[0] + 1

    def _messages(self, cut: LayerCut, on_links: int, zero: ZeroStage, replicas: int) -> CutMessages:
        """Of a cut where these stages have fast links."""
        fast, slow = self.devices.fast_link, self.devices.slow_link
        links = [fast if on_links >> place & 1 else slow for place in range(len(cut))]
        sums = self._sums(cut, zero, replicas, links)
        most = max(sums)
        layers = min(stage.layers for stage, one in zip(cut, sums, strict=True) if one == most)
        always = zero.gathers * self.sent.gathered / self._each(zero) * most if most else 0.0
        return CutMessages(sums, most, layers, always, self._anew(zero, replicas, links))

    def _best_messages(self, cut: LayerCut, zero: ZeroStage, replicas: int) -> CutMessages:
        """No more than of any stages with fast links that there are enough of."""
        fast, slow, count = self.devices.fast_link, self.devices.slow_link, self.devices.holders[LINKED] // replicas
        links = [slow] * max(0, len(cut) - count) + [fast] * min(len(cut), count)
        by_elements, by_layers = _by_size(cut)
        largest, among_slow = cut[by_elements[-1]], cut[by_elements[-1 - count]] if count < len(cut) else cut[0]
        of_two = [fast if count else slow, slow if count < len(cut) else fast]
        most = max(self._sums([largest, among_slow], zero, replicas, of_two))
        always = zero.gathers * self.sent.gathered / self._each(zero) * most if most else 0.0
        anew = dict(zip(by_layers, self._anew(zero, replicas, links), strict=True))
        sums = self._sums(cut, zero, replicas, [fast] * len(cut))
        return CutMessages(sums, most, 0, always, tuple(anew[place] for place in range(len(cut))))

    def _each(self, zero: ZeroStage) -> float:
        """Bytes for an element that all replicas hold."""
        return zero.sums * self.sent.summed + zero.gathers * self.sent.gathered

    def _sums(
        self, cut: Sequence[CutStage], zero: ZeroStage, replicas: int, links: Sequence[float]
    ) -> tuple[float, ...]:
        part, lost, each = (replicas - 1) / replicas, self.sent.lost, self._each(zero)
        return tuple(
            each * max(0.0, part * stage.elements - lost) / link for stage, link in zip(cut, links, strict=True)
        )

    def _anew(self, zero: ZeroStage, replicas: int, links: Sequence[float]) -> tuple[float, ...]:
        """Seconds of a gather of a layer forward and backward, by stage."""
        nbytes = 2 * (replicas - 1) / replicas * self.sent.layer * self.sent.gathered * (not zero.weights)
        return tuple(nbytes / link for link in links)

    def _most_rows(
        self,
        cut: LayerCut,
        on_links: int,
        zero: ZeroStage,
        messages: CutMessages,
        seconds: float,
        steps: int = MOST_STEPS,
    ) -> float:
        """All rows that replicas may do at most: the linear program over how many there are of each kind."""
        best, kinds = 0.0, list(self._kinds(cut, messages.sums))
        supplies = (self._whole_replicas(cut) * len(cut), *self.devices.holders[1:])
        for passes in PASSES if most_chunks(cut) > 1 else PASSES[:1]:
            values, demands = list[float](), list[list[float]]()
            for kind in kinds:
                replica = ReplicaMicrobatches(self.work, self.devices, cut, kind, messages)
                on_fast = kind.on_fast.bit_count() + kind.others
                on_both = (kind.on_fast & on_links).bit_count()
                for large, below in pairwise(_steps(len(cut) + 1, steps)):
                    count, is_limited = replica.most(seconds, passes, zero, below - 1)
                    values.append(count * self.work.part[1])
                    demands.append([len(cut), on_fast, on_links.bit_count(), on_both, large])
                    if not is_limited:
                        break  # more memory is of no use
            most = most_of(values, demands, supplies)
            if most * (1 + ROUNDING) >= self.work.rows:
                most = most_of(values, *with_whole_numbers(demands, supplies))
            best = max(best, most)
        return best * (1 + ROUNDING)

    def _whole_replicas(self, cut: LayerCut) -> int:
        """How many there can be, as many of which share microbatches as ranks do."""
        return self.work.ranks * (self.devices.holders[0] // (self.work.ranks * len(cut)))

    def _kinds(self, cut: LayerCut, sums: Sequence[float]) -> Iterator[ReplicaKind]:
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
                yield ReplicaKind(on_fast, others, tuple(sorted(times, reverse=True)))


@lru_cache(16)
def _levels(cut: LayerCut) -> tuple[list[float], list[tuple[int, int]]]:
    """Loads up to which stages may be on slow devices; and for each how many devices are fast, and how many there
    are."""
    levels = [0.0, *dict.fromkeys(stage.load for stage in cut)]
    return levels, [(sum(stage.load > level for stage in cut), len(cut)) for level in levels]


@lru_cache(16)
def _by_size(cut: LayerCut) -> tuple[list[int], list[int]]:
    """Stages by what they learn, and by their layers."""
    places = range(len(cut))
    return (
        sorted(places, key=lambda place: cut[place].elements),
        sorted(places, key=lambda place: cut[place].layers),
    )


def _steps(whole: int, steps: int) -> list[int]:
    """About so many steps from 0 to `whole`."""
    return sorted({whole * step // steps for step in range(steps + 1)})


def _subsets(cut: LayerCut, most: int) -> Iterator[int]:
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
