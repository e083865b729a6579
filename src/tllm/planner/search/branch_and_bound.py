"""`BranchAndBound`: the best serving plan of so many stages over so many devices, by branch and bound."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tllm.planner.cluster.alike import Counts, contains, minus
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.serving_load import ServingLoad
from tllm.planner.search.stage_options import StageOption, TimedOption
from tllm.planner.simulate.serving import hop_time
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Experts


class StageSums(NamedTuple):
    """Of the stages so far: seconds of a chunk of prompts, of the slowest of them, and the same of a token's batch."""

    prefill: float = 0.0
    slowest_prefill: float = 0.0
    decode: float = 0.0
    slowest_decode: float = 0.0


class Rest(NamedTuple):
    """What layers take at the least on what is left: of prompts and of tokens, `filled[layers]`; stages' rates."""

    prefill: list[float]
    decode: list[float]
    rate_prefill: float
    rate_decode: float


Chosen = tuple[tuple[TimedOption, int], ...]
"""The stages so far, each with the layer before which it stops."""


class BranchAndBound:
    """Of plans of `load.stages` stages over `count` devices. `best` is their least seconds, `chosen` that plan."""

    def __init__(
        self,
        spec: ModelSpec,
        cluster: Cluster,
        load: ServingLoad,
        kinds: Sequence[Sequence[int]],
        options: Sequence[TimedOption],
        count: int,
        experts: Experts,
    ) -> None:
        self.spec, self.cluster, self.load, self.kinds, self.experts = spec, cluster, load, kinds, experts
        self.stages, self.count = load.stages, count
        self.options = [option for option in options if option.size <= count - load.stages + 1]
        self.alike = defaultdict[Counts, list[TimedOption]](
            list
        )  # options of the same devices: no two are taken for them
        for option in self.options:
            self.alike[option.option.counts].append(option)
        self.best, self.chosen, self.steps = math.inf, tuple[tuple[StageOption, int], ...](), 0
        self.limit, self.cutoff, self.complete = 0, math.inf, False
        self.known: dict[tuple[object, ...], list[StageSums]] = {}
        self.rests: dict[tuple[Counts, int, int], Rest] = {}
        self.hops: dict[tuple[int, int, bool], tuple[float, float, float, float]] = {}
        self.whole = tuple(map(len, kinds))
        self.root = self._bound(StageSums(), 0, 0, self.whole, count)

    def look(self, steps: int, cutoff: float = math.inf) -> None:
        """Try up to so many stages more, for a plan faster than `cutoff`."""
        self.limit, self.cutoff = self.steps + steps, min(cutoff, self.best)
        self.known.clear()
        if self.root < self.cutoff:
            self._place((), StageSums(), 0, self.whole, self.count)
        self.complete = self.steps <= self.limit

    def _place(self, chosen: Chosen, sums: StageSums, start: int, free: Counts, devices: int) -> None:
        """Choose the next stage, in the order of what may come of it."""
        after = len(chosen) + 1
        last = after == self.stages
        children = list[tuple[float, int, TimedOption, int, StageSums, Counts]]()
        for option in self.options:
            if not contains(free, option.option.counts):
                continue
            if option.size != devices if last else option.size > devices - self.stages + after:
                continue
            left, reach = minus(free, option.option.counts), option.option.reach(start)
            first = self.spec.num_layers if last else start + 1
            for stop in range(first, min(reach, self.spec.num_layers - self.stages + after) + 1):
                self.steps += 1
                reached = self._with(chosen, sums, option, start, stop)
                bound = self._bound(reached, after, stop, left, devices - option.size)
                if bound < self.cutoff:
                    children.append((bound, len(children), option, stop, reached, left))
        for bound, _, option, stop, reached, left in sorted(children, key=lambda child: child[:2]):
            if bound >= self.cutoff or self.steps > self.limit:
                break
            now = (*chosen, (option, stop))
            if not last and self._is_new(now, left, reached):
                self._place(now, reached, stop, left, devices - option.size)
            elif last and option.option.team.fits(range(start, stop)):
                self.best = self.cutoff = bound
                self.chosen = tuple((one.option, end) for one, end in now)

    def _with(self, chosen: Chosen, sums: StageSums, option: TimedOption, start: int, stop: int) -> StageSums:
        """The sums with one stage more, the hop to it, and after the last stage the way back."""
        last = stop == self.spec.num_layers
        end_prefill, end_decode = option.ends[not chosen, last]
        prefill = option.prefill[stop] - option.prefill[start] + end_prefill
        decode = option.decode[stop] - option.decode[start] + end_decode
        total_prefill, slowest_prefill = sums.prefill + prefill, max(sums.slowest_prefill, prefill)
        total_decode, slowest_decode = sums.decode + decode, max(sums.slowest_decode, decode)
        ways = [self._hop(chosen[-1][0], option, False)] if chosen else []
        ways += [self._hop(option, chosen[0][0], True)] if chosen and last else []
        for hop_prefill, wire_prefill, hop_decode, wire_decode in ways:
            total_prefill, slowest_prefill = total_prefill + hop_prefill, max(slowest_prefill, wire_prefill)
            total_decode, slowest_decode = total_decode + hop_decode, max(slowest_decode, wire_decode)
        return StageSums(total_prefill, slowest_prefill, total_decode, slowest_decode)

    def _hop(self, here: TimedOption, there: TimedOption, closes: bool) -> tuple[float, float, float, float]:
        """Seconds, and seconds of the wire: of a chunk of prompts, of a token's batch."""
        one, other = here.option.order[0], there.option.order[0]
        key = (one, other, closes)
        if key not in self.hops:
            # Two teams have no device in common: one takes its leader from the beginning of a kind, one from its end.
            ends, item = (self.kinds[one][0], self.kinds[other][-1]), self.load.facts.message_bytes
            prefill, decode = (
                hop_time(self.spec, self.cluster, item, *ends, batch, closes)
                for batch in (self.load.prefill, self.load.decode)
            )
            self.hops[key] = prefill.seconds, prefill.sending, decode.seconds, decode.sending
        return self.hops[key]

    def _is_new(self, chosen: Chosen, left: Counts, sums: StageSums) -> bool:
        """Whether no other beginning with the same devices, layers and ends is nowhere slower."""
        option, stop = chosen[-1]
        known = self.known.setdefault((left, id(option), id(chosen[0][0]), stop, len(chosen)), [])
        if any(_is_nowhere_slower(other, sums) for other in known):
            return False
        known[:] = [other for other in known if not _is_nowhere_slower(sums, other)]
        known.append(sums)
        return True

    def _bound(self, sums: StageSums, after: int, start: int, free: Counts, devices: int) -> float:
        """Seconds at the least of every plan that begins so; infinite where the layers left do not fit."""
        stages, layers = self.stages - after, self.spec.num_layers - start
        prefill, slowest_prefill, decode, slowest_decode = sums
        if stages:
            rest = self._rest(free, stages, devices)
            prefill, decode = prefill + rest.prefill[layers], decode + rest.decode[layers]
            slowest_prefill = max(slowest_prefill, layers * rest.rate_prefill)
            slowest_decode = max(slowest_decode, layers * rest.rate_decode)
        return self.load.total_seconds((prefill, slowest_prefill), (decode, slowest_decode))

    def _rest(self, free: Counts, stages: int, devices: int) -> Rest:
        key = (free, stages, devices)
        if key not in self.rests:
            prefill, decode = list[tuple[float, int]](), list[tuple[float, int]]()
            for counts, some in self.alike.items():
                if sum(counts) <= devices - stages + 1 and contains(free, counts):
                    copies = min(count // own for count, own in zip(free, counts, strict=True) if own)
                    copies, most = min(copies, stages), max(one.option.most for one in some)
                    prefill += [(min(one.least_prefill for one in some), most)] * copies
                    decode += [(min(one.least_decode for one in some), most)] * copies
            self.rests[key] = Rest(
                self._filled(sorted(prefill)),
                self._filled(sorted(decode)),
                _even(sorted(prefill)[:stages]),
                _even(sorted(decode)[:stages]),
            )
        return self.rests[key]

    def _filled(self, options: Sequence[tuple[float, int]]) -> list[float]:
        """Seconds of so many layers on the cheapest options, each as full as it can be; infinite beyond all room."""
        seconds = [0.0]
        for cost, room in options:
            seconds += [seconds[-1] + cost * count for count in range(1, room + 1)]
            if len(seconds) > self.spec.num_layers:
                break
        return seconds + [math.inf] * (self.spec.num_layers + 1 - len(seconds))


def _even(options: Sequence[tuple[float, int]]) -> float:
    """Seconds for each layer of the slowest stage, if all stages took equally long."""
    rate = sum(1 / cost if cost else math.inf for cost, _ in options)
    return 1 / rate if rate else math.inf


def _is_nowhere_slower(one: StageSums, other: StageSums) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))
