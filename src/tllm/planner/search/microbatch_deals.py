"""`StageSeconds`: what a stage takes for a microbatch. `ReplicaBound`: what a replica takes at least for a number of
them. And the deal of a step's microbatches to replicas with which the slowest one ends as early as possible."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tllm.planner.cost.flops import BACKWARD


@dataclass(frozen=True)
class StageSeconds:
    """A third of the seconds of one microbatch on the devices of one stage, through each layer of the model, and of
    logits: those of a forward pass where all gradients are computed, and less where an adapter spares some."""

    layers: tuple[float, ...]
    logits: float

    @cached_property
    def _before(self) -> tuple[float, ...]:
        """The sum over the layers before each one."""
        total = [0.0]
        for seconds in self.layers:
            total.append(total[-1] + seconds)
        return tuple(total)

    def run_seconds(self, layers: range) -> float:
        """Of one run of layers, and of the logits if it is the last."""
        is_last = layers.stop == len(self.layers)
        return self._before[layers.stop] - self._before[layers.start] + (self.logits if is_last else 0.0)


class ReplicaBound:
    """Seconds that a replica's step takes at least: each stage waits for the first microbatch, and then does its own
    work."""

    def __init__(self, stages: Sequence[StageSeconds], runs: Sequence[range]) -> None:
        self._stages: list[tuple[float, float]] = []
        begun, pp = 0.0, len(stages)
        for stage, cost in enumerate(stages):
            work = sum(cost.run_seconds(run) for run in runs[stage::pp])
            self._stages.append((begun, (1 + BACKWARD) * work))
            begun += cost.run_seconds(runs[stage])

    def seconds(self, microbatches: int) -> float:
        """Of so many microbatches."""
        return max(begun + microbatches * work for begun, work in self._stages)

    @property
    def each(self) -> float:
        """Seconds of one microbatch more."""
        return max(work for _, work in self._stages)

    def most(self, seconds: float, limit: int) -> int:
        """How many microbatches, from one to `limit`, end within so many seconds."""
        room = min((seconds - begun) / work if work else limit for begun, work in self._stages)
        count = max(1, min(limit, math.floor(room)))
        while count > 1 and self.seconds(count) > seconds:
            count -= 1
        while count < limit and self.seconds(count + 1) <= seconds:
            count += 1
        return count


def replica_bounds(replicas: Sequence[Sequence[StageSeconds]], runs: Sequence[range]) -> list[ReplicaBound]:
    """The bound of each replica; one object for replicas whose stages cost the same."""
    known: dict[tuple[int, ...], ReplicaBound] = {}
    bounds = list[ReplicaBound]()
    for stages in replicas:
        key = tuple(map(id, stages))
        if key not in known:
            known[key] = ReplicaBound(stages, runs)
        bounds.append(known[key])
    return bounds


def balanced_deal(replicas: Sequence[ReplicaBound], microbatches: int) -> tuple[int, ...]:
    """How many of the microbatches each replica takes, one at least, so that the slowest ends as early as possible.

    The next microbatch always goes to the replica that would end first with it. Those that end within a time which is
    too short for all of them are dealt at once, so that no more than about one for each replica is dealt alone.
    Replicas that are one object cost as much as one.
    """
    alike = Counter(map(id, replicas))
    one_of = {id(replica): replica for replica in replicas}
    rate = sum(count / one_of[key].each for key, count in alike.items() if one_of[key].each)
    seconds = microbatches / rate if rate else 0.0
    while True:
        within = {key: replica.most(seconds, microbatches) for key, replica in one_of.items()}
        if sum(within[key] * count for key, count in alike.items()) <= microbatches:
            break
        seconds *= 0.9
    counts = [within[id(replica)] for replica in replicas]
    following = [(replica.seconds(counts[place] + 1), place) for place, replica in enumerate(replicas)]
    heapq.heapify(following)
    for _ in range(microbatches - sum(counts)):
        _, place = following[0]
        counts[place] += 1
        heapq.heapreplace(following, (replicas[place].seconds(counts[place] + 1), place))
    return tuple(counts)


def lowest_terms(numbers: Iterable[int]) -> tuple[int, ...]:
    """The same proportion in the smallest whole numbers."""
    numbers = tuple(numbers)
    divisor = math.gcd(*numbers)
    return tuple(number // divisor for number in numbers)


def slowest(costs: Iterable[StageSeconds]) -> StageSeconds:
    """Layer by layer the largest cost; of one that comes several times it is looked at once."""
    different = list({id(cost): cost for cost in costs}.values())
    if len(different) == 1:
        return different[0]
    return StageSeconds(
        tuple(max(seconds) for seconds in zip(*(cost.layers for cost in different), strict=True)),
        max(cost.logits for cost in different),
    )
