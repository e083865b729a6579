"""`BranchAndBound`: the best serving plan of so many stages over so many devices, by branch and bound.

The search tree grows stage by stage: a node of the tree is a prefix of a plan, its first stages with their devices and
layers. A prefix is given up where a lower bound on every plan that begins with it is no better than the best plan known
(`LowerBound`), or where another prefix with the same devices, layers and ends is nowhere slower (`Prefixes`).
All times are in seconds, for one chunk of prompts (prefill) or for one decode step of a batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tllm.planner.cluster.device import Cluster
from tllm.planner.cluster.device_kinds import Counts, contains, minus
from tllm.planner.cost.serving_load import RingSeconds, ServingLoad
from tllm.planner.search.stage_options import Division, TimedOption
from tllm.planner.simulate.serving import hop_time
from tllm.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class SearchSpace:
    """The plans that one search is among: `load.stages` stages over exactly `device_count` devices."""

    spec: ModelSpec
    cluster: Cluster
    load: ServingLoad
    kinds: Sequence[Sequence[int]]
    """The devices that may be used, by kind (`cluster.device_kinds`)."""
    options: Sequence[TimedOption]
    """What may hold a stage."""
    device_count: int
    division: Division

    @property
    def stages(self) -> int:
        return self.load.stages

    @property
    def all_devices(self) -> Counts:
        """How many devices of each kind there are."""
        return tuple(map(len, self.kinds))


class PrefixSeconds(NamedTuple):
    """What the stages of a prefix and the hops between them take: in sum, and the slowest of them."""

    prefill: float = 0.0
    slowest_prefill: float = 0.0
    decode: float = 0.0
    slowest_decode: float = 0.0

    def is_nowhere_slower(self, other: PrefixSeconds) -> bool:
        return all(a <= b for a, b in zip(self, other, strict=True))


class ChosenStage(NamedTuple):
    """A stage of a prefix: what holds it, and the layer before which it stops."""

    option: TimedOption
    stop: int


Prefix = tuple[ChosenStage, ...]


class Branch(NamedTuple):
    """A child of a prefix: `stage` added to it. `bound`: at least so many seconds for every plan that begins so."""

    bound: float
    number: int
    stage: ChosenStage
    seconds: PrefixSeconds
    free: Counts
    """Devices of each kind that are left."""


class HopSeconds(NamedTuple):
    """Seconds of a hop, and of those the seconds for which its wire is busy."""

    prefill: float
    prefill_sending: float
    decode: float
    decode_sending: float


class RemainingCost(NamedTuple):
    """What the remaining layers take at least on the devices that are left.

    `prefill[n]` and `decode[n]` are seconds of n layers on the cheapest options, each filled to its memory; infinite
    where n layers do not fit. `prefill_rate` and `decode_rate` are seconds per layer of the slowest remaining stage, if
    all remaining stages took equally long.
    """

    prefill: list[float]
    decode: list[float]
    prefill_rate: float
    decode_rate: float


class BranchAndBound:
    """One search. `best` is the least number of seconds found so far, `chosen` the stages of that plan."""

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self.best, self.chosen = math.inf, Prefix()
        self.steps = 0
        """Stages tried so far, in all calls of `run`."""
        self.is_complete = False
        """Whether the last call ended before its limit, so that nothing better was left out."""
        most = space.device_count - space.stages + 1  # every other stage needs one device
        self._options = [option for option in space.options if option.device_count <= most]
        self._hops, self._bounds, self._prefixes = HopTimes(space), LowerBound(space, self._options), Prefixes()
        self._limit, self._cutoff = 0, math.inf
        self.root_bound = self._bounds.seconds(PrefixSeconds(), 0, 0, space.all_devices, space.device_count)
        """Seconds that every plan of the space takes at least."""

    def run(self, steps: int, cutoff: float = math.inf) -> None:
        """Try up to so many stages more, for a plan faster than `cutoff` seconds and than the best found before."""
        self._limit, self._cutoff = self.steps + steps, min(cutoff, self.best)
        self._prefixes.clear()
        if self.root_bound < self._cutoff:
            self._extend((), PrefixSeconds(), self.space.all_devices, self.space.device_count)
        self.is_complete = self.steps <= self._limit

    def _extend(self, prefix: Prefix, seconds: PrefixSeconds, free: Counts, devices: int) -> None:
        """Try every next stage, the one with the least bound first. `devices`: how many are left to use."""
        start, is_last = prefix[-1].stop if prefix else 0, len(prefix) + 1 == self.space.stages
        for branch in sorted(self._branches(prefix, seconds, free, devices), key=lambda child: child[:2]):
            if branch.bound >= self._cutoff or self.steps > self._limit:
                break
            extended, option = (*prefix, branch.stage), branch.stage.option
            if not is_last and self._prefixes.add(extended, branch.free, branch.seconds):
                self._extend(extended, branch.seconds, branch.free, devices - option.device_count)
            elif is_last and option.option.team.fits(range(start, branch.stage.stop)):
                self.best = self._cutoff = branch.bound
                self.chosen = extended

    def _branches(self, prefix: Prefix, seconds: PrefixSeconds, free: Counts, devices: int) -> list[Branch]:
        """The children of a prefix whose bound is below the cutoff."""
        num_layers, stages = self.space.spec.num_layers, self.space.stages
        start, count = prefix[-1].stop if prefix else 0, len(prefix) + 1
        is_last = count == stages
        branches: list[Branch] = []
        for option in self._options:
            if not contains(free, option.option.counts):
                continue
            if option.device_count != devices if is_last else option.device_count > devices - stages + count:
                continue
            left, stops = minus(free, option.option.counts), option.option.max_stop(start)
            first = num_layers if is_last else start + 1
            for stop in range(first, min(stops, num_layers - stages + count) + 1):
                self.steps += 1
                extended = self._with_stage(prefix, seconds, option, start, stop)
                bound = self._bounds.seconds(extended, count, stop, left, devices - option.device_count)
                if bound < self._cutoff:
                    branches.append(Branch(bound, len(branches), ChosenStage(option, stop), extended, left))
        return branches

    def _with_stage(
        self, prefix: Prefix, seconds: PrefixSeconds, option: TimedOption, start: int, stop: int
    ) -> PrefixSeconds:
        """The seconds with one stage more, the hop to it, and after the last stage the hop back to the first."""
        is_last = stop == self.space.spec.num_layers
        end_prefill, end_decode = option.ends[not prefix, is_last]
        prefill = option.prefill[stop] - option.prefill[start] + end_prefill
        decode = option.decode[stop] - option.decode[start] + end_decode
        total_prefill, slowest_prefill = seconds.prefill + prefill, max(seconds.slowest_prefill, prefill)
        total_decode, slowest_decode = seconds.decode + decode, max(seconds.slowest_decode, decode)
        hops = [self._hops.between(prefix[-1].option, option, False)] if prefix else []
        hops += [self._hops.between(option, prefix[0].option, True)] if prefix and is_last else []
        for hop in hops:
            total_prefill, slowest_prefill = total_prefill + hop.prefill, max(slowest_prefill, hop.prefill_sending)
            total_decode, slowest_decode = total_decode + hop.decode, max(slowest_decode, hop.decode_sending)
        return PrefixSeconds(total_prefill, slowest_prefill, total_decode, slowest_decode)


class HopTimes:
    """Seconds of hops between options, each worked out once for the kinds of its two leaders."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._known: dict[tuple[int, int, bool], HopSeconds] = {}

    def between(self, here: TimedOption, there: TimedOption, closes: bool) -> HopSeconds:
        """From the leader of one stage to that of another. `closes`: from the last stage back to the first."""
        source, target = here.option.order[0], there.option.order[0]
        key = (source, target, closes)
        if key not in self._known:
            space, load = self._space, self._space.load
            # Two teams share no device: one takes its leader from the beginning of a kind, one from its end.
            ends = space.kinds[source][0], space.kinds[target][-1]
            prefill, decode = (
                hop_time(space.spec, space.cluster, load.facts.message_bytes, *ends, batch, closes)
                for batch in (load.prefill, load.decode)
            )
            self._known[key] = HopSeconds(prefill.seconds, prefill.sending, decode.seconds, decode.sending)
        return self._known[key]


class LowerBound:
    """Seconds that every plan with a given prefix takes at least, if the fastest devices that are left held its
    remaining layers, each filled up to its memory and reached in no time."""

    def __init__(self, space: SearchSpace, options: Sequence[TimedOption]) -> None:
        self._load, self._stages, self._num_layers = space.load, space.stages, space.spec.num_layers
        self._by_counts = defaultdict[Counts, list[TimedOption]](list)
        for option in options:
            self._by_counts[option.option.counts].append(option)
        self._known: dict[tuple[Counts, int, int], RemainingCost] = {}

    def seconds(self, prefix: PrefixSeconds, count: int, start: int, free: Counts, devices: int) -> float:
        """The bound for a prefix of `count` stages that hold the layers before `start`; infinite where the remaining
        layers do not fit. `free` devices of each kind are left, of which `devices` are to be used."""
        stages, layers = self._stages - count, self._num_layers - start
        prefill, slowest_prefill, decode, slowest_decode = prefix
        if stages:
            remaining = self._remaining(free, stages, devices)
            if math.isinf(remaining.prefill[layers]):
                return math.inf  # for no tokens, too, of which so many seconds would be no number
            prefill, decode = prefill + remaining.prefill[layers], decode + remaining.decode[layers]
            slowest_prefill = max(slowest_prefill, layers * remaining.prefill_rate)
            slowest_decode = max(slowest_decode, layers * remaining.decode_rate)
        return self._load.total_seconds(RingSeconds(prefill, slowest_prefill), RingSeconds(decode, slowest_decode))

    def _remaining(self, free: Counts, stages: int, devices: int) -> RemainingCost:
        key = (free, stages, devices)
        if key not in self._known:
            prefill, decode = list[tuple[float, int]](), list[tuple[float, int]]()
            # Options of the same devices exclude one another: of each group the cheapest layer and the most room count.
            for counts, options in self._by_counts.items():
                if sum(counts) <= devices - stages + 1 and contains(free, counts):
                    copies = min(count // used for count, used in zip(free, counts, strict=True) if used)
                    copies, room = min(copies, stages), max(option.option.max_layers for option in options)
                    prefill += [(min(option.cheapest_prefill for option in options), room)] * copies
                    decode += [(min(option.cheapest_decode for option in options), room)] * copies
            self._known[key] = RemainingCost(
                self._cheapest_sums(sorted(prefill)),
                self._cheapest_sums(sorted(decode)),
                _balanced_rate(sorted(prefill)[:stages]),
                _balanced_rate(sorted(decode)[:stages]),
            )
        return self._known[key]

    def _cheapest_sums(self, options: Sequence[tuple[float, int]]) -> list[float]:
        """Seconds of 0, 1, 2 … layers on the cheapest (seconds per layer, room), each as full as it can be."""
        seconds = [0.0]
        for cost, room in options:
            seconds += [seconds[-1] + cost * count for count in range(1, room + 1)]
            if len(seconds) > self._num_layers:
                break
        return seconds + [math.inf] * (self._num_layers + 1 - len(seconds))


class Prefixes:
    """The prefixes seen so far that no other one dominates."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], list[PrefixSeconds]] = {}

    def clear(self) -> None:
        self._known.clear()

    def add(self, prefix: Prefix, free: Counts, seconds: PrefixSeconds) -> bool:
        """Whether no prefix with the same devices, layers and ends is nowhere slower; if so, it is remembered."""
        option, stop = prefix[-1]
        known = self._known.setdefault((free, id(option), id(prefix[0].option), stop, len(prefix)), [])
        if any(other.is_nowhere_slower(seconds) for other in known):
            return False
        known[:] = [other for other in known if not seconds.is_nowhere_slower(other)]
        known.append(seconds)
        return True


def _balanced_rate(options: Sequence[tuple[float, int]]) -> float:
    """Seconds per layer of the slowest stage, if all stages took equally long."""
    rate = sum(1 / cost if cost else math.inf for cost, _ in options)
    return 1 / rate if rate else math.inf
