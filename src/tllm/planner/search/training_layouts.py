"""Every way worth a look to lay a training step out over devices: their order, the axes, the cut, the deal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, product

from tllm.core.errors import PlanError
from tllm.planner.cluster.alike import Counts, counts_upto, kinds_of
from tllm.planner.cluster.device import Cluster, Device
from tllm.planner.cost.flops import BACKWARD, layer_flops, logits_flops
from tllm.planner.cost.rank_work import TrainingFacts, deal_microbatches
from tllm.planner.search.layer_cuts import balanced_bounds, even_bounds
from tllm.planner.search.stage_options import whole_shares
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan, Stage

MOST_ORDERS = 24
"""Orders of devices that are all looked at; of more only those of the cluster and by speed."""

MOST_CUTS = 40
"""Cuts of the layers that are all looked at; of more the even one and the balanced one."""

MOST_DEVICES = 16
"""Devices of which some may be left out; of more all are used."""

MICROBATCHES = (1, 2, 4, 8, 16, 32)
CHUNKS = (1, 2, 4)


@dataclass(frozen=True)
class TrainingConstraints:
    """What is not free: the `microbatch_sizes` of a microbatch, the device of rank 0, and plans that `check` raises PlanError for
    (with the microbatches of each replica)."""

    microbatch_sizes: tuple[int, ...] = MICROBATCHES
    first_device: int | None = None
    check: Callable[[Plan, TrainingFacts], None] = lambda plan, facts: None


@dataclass(frozen=True)
class TrainingLayout:
    """Where work is done; what is left open are its order in time and what is kept where."""

    plan: Plan
    devices: tuple[int, ...]
    facts: TrainingFacts
    lower_bound: float
    """Seconds that a step takes at the least: each stage waits for the first microbatch, then does its work."""


class TrainingLayouts:
    """All layouts of a model's step on a cluster."""

    def __init__(self, spec: ModelSpec, cluster: Cluster, facts: TrainingFacts, pinned: TrainingConstraints) -> None:
        self.spec, self.cluster, self.facts, self.pinned = spec, cluster, facts, pinned
        self.kinds = kinds_of(cluster, range(len(cluster))) if len(cluster) <= MOST_DEVICES else []
        self.costs: dict[tuple[tuple[int, ...], int, int], list[_Cost]] = {}
        self.is_exhaustive = len(cluster) <= MOST_DEVICES
        """Whether nothing was left out; known once all are made."""

    def __iter__(self) -> Iterator[TrainingLayout]:
        first = self.pinned.first_device
        for devices in dict.fromkeys(_led_by(first, order) for order in self._orders() if first in (None, *order)):
            for dp, pp, cp, tp in _axes(len(devices)):
                if pp <= self.spec.num_layers and cp <= self.facts.seq_len // 2:
                    yield from self._of(devices, dp, pp, cp, tp)

    def _orders(self) -> Iterator[tuple[int, ...]]:
        """Choices of devices, in orders that are not alike."""
        if not self.kinds:
            yield from dict.fromkeys([tuple(range(len(self.cluster))), self._by_speed(range(len(self.cluster)), -1)])
            return
        whole = tuple(map(len, self.kinds))
        for counts in counts_upto(whole, sum(whole)):
            devices = [device for kind, number in zip(self.kinds, counts, strict=True) for device in kind[:number]]
            if _permutations(counts) <= MOST_ORDERS:
                yield from self._permuted(counts, ())
            else:
                self.is_exhaustive = False
                orders = [tuple(sorted(devices)), self._by_speed(devices, -1), self._by_speed(devices, 1)]
                yield from dict.fromkeys(orders)

    def _permuted(self, left: Counts, taken: Counts) -> Iterator[tuple[int, ...]]:
        """Every order of so many devices of each kind; `taken` are the kinds so far."""
        if not any(left):
            yield tuple(self.kinds[kind][taken[:place].count(kind)] for place, kind in enumerate(taken))
        for kind, count in enumerate(left):
            if count:
                yield from self._permuted((*left[:kind], count - 1, *left[kind + 1 :]), (*taken, kind))

    def _by_speed(self, devices: Sequence[int], sign: int) -> tuple[int, ...]:
        rows = self.facts.seq_len
        return tuple(
            sorted(devices, key=lambda one: sign * self.cluster.devices[one].matrix_rate(self.facts.dtype, rows))
        )

    def _of(self, devices: tuple[int, ...], dp: int, pp: int, cp: int, tp: int) -> Iterator[TrainingLayout]:
        """Layouts of one choice of axes."""
        seats = _Seats(devices, dp, pp, cp, tp)
        has_experts = any(layer.moe for layer in self.spec.layers)
        eps = [ep for ep in range(1, dp + 1) if dp % ep == 0] if has_experts else [1]
        for size in self.pinned.microbatch_sizes:
            facts = replace(self.facts, microbatch_size=size)
            if facts.microbatches < dp or size > self.facts.global_batch_size:
                continue
            for shares, ep in product(self._shares(seats), eps):
                try:
                    yield from self._cut(seats, shares, ep, facts)
                except PlanError:
                    continue  # more ranks than there is to cut

    def _shares(self, seats: _Seats) -> list[tuple[tuple[int, ...], ...]]:
        """For each stage the shares of its ranks: even, and by the speed of the slowest in each place."""
        by_speed = []
        for stage in range(seats.pp):
            rates = [
                min(self._device(device).matrix_rate(self.facts.dtype, self.facts.seq_len) for device in devices)
                for devices in seats.places(stage)
            ]
            by_speed.append(whole_shares(rates))
        return list(dict.fromkeys([((1,) * seats.tp,) * seats.pp, tuple(by_speed)]))

    def _cut(
        self, seats: _Seats, shares: tuple[tuple[int, ...], ...], ep: int, facts: TrainingFacts
    ) -> Iterator[TrainingLayout]:
        costs = [[self._cost(seats, r, s, shares[s], facts) for s in range(seats.pp)] for r in range(seats.dp)]
        stages = [_slowest([replica[s] for replica in costs]) for s in range(seats.pp)]
        for chunks in CHUNKS if seats.pp > 1 else (1,):
            for bounds in self._bounds(stages, chunks):
                runs = [range(a, b) for a, b in pairwise(bounds)]
                for dp in self._deals(costs, runs, facts, ep):
                    plan = Plan(
                        tuple(Stage(run.start, run.stop, shares[i % seats.pp]) for i, run in enumerate(runs)),
                        dp=dp,
                        cp=seats.cp,
                        ep=ep,
                        chunks=chunks,
                        schedule="interleaved" if chunks > 1 else "1f1b",
                    )
                    least = max(
                        _least(replica, runs, count)
                        for replica, count in zip(costs, deal_microbatches(facts.microbatches, dp), strict=True)
                    )
                    yield TrainingLayout(plan, seats.devices, facts, least)

    def _bounds(self, stages: Sequence[_Cost], chunks: int) -> list[tuple[int, ...]]:
        """Where runs of layers begin and end."""
        layers, runs = self.spec.num_layers, len(stages) * chunks
        if runs > layers:
            return []
        if math.comb(layers - 1, runs - 1) <= MOST_CUTS:
            return [(0, *inner, layers) for inner in combinations(range(1, layers), runs - 1)]
        self.is_exhaustive = False
        return list(
            dict.fromkeys([even_bounds(layers, runs), balanced_bounds([stage.layers for stage in stages] * chunks)])
        )

    def _deals(
        self, costs: Sequence[Sequence[_Cost]], runs: Sequence[range], facts: TrainingFacts, ep: int
    ) -> list[tuple[int, ...]]:
        """Shares of the replicas: all of few; else even, and so that the slowest ends as early as can be."""
        dp, found = len(costs), [(1,) * len(costs)]
        if any(replica != costs[0] for replica in costs) and ep == 1:
            if math.comb(facts.microbatches - 1, dp - 1) <= MOST_CUTS:
                deals = combinations(range(1, facts.microbatches), dp - 1)
                return [_least_terms(b - a for a, b in pairwise((0, *inner, facts.microbatches))) for inner in deals]
            self.is_exhaustive = False
            counts = [1] * dp
            for _ in range(facts.microbatches - dp):
                nexts = [_least(replica, runs, count + 1) for replica, count in zip(costs, counts, strict=True)]
                counts[nexts.index(min(nexts))] += 1
            found.append(_least_terms(counts))
        return list(dict.fromkeys(found))

    def _cost(self, seats: _Seats, replica: int, stage: int, shares: tuple[int, ...], facts: TrainingFacts) -> _Cost:
        """What the slowest rank of a replica's stage takes for a microbatch."""
        of_ranks = []
        cuts = cut_stage(self.spec, shares)
        whole = sum(facts.lengths)
        for cp, tp in product(range(seats.cp), range(seats.tp)):
            device, cut = self._device(seats.at(replica, stage, cp, tp)), cuts[tp]
            rate = device.matrix_rate(facts.dtype, whole // seats.cp) * seats.cp
            of_kind: dict[object, float] = {}
            for layer in self.spec.layers:
                if layer not in of_kind:
                    of_kind[layer] = layer_flops(self.spec, layer, cut, facts.lengths) / rate
            head = device.logits_rate(facts.dtype, whole // seats.cp) * seats.cp
            end = logits_flops(self.spec, cut, whole) / head
            of_ranks.append(_Cost(tuple(of_kind[layer] for layer in self.spec.layers), end))
        return _slowest(of_ranks)

    def _device(self, device: int) -> Device:
        return self.cluster.devices[device]


@dataclass(frozen=True)
class _Cost:
    """Seconds of the forward pass of a microbatch through each layer, and of its logits, on one stage's devices."""

    layers: tuple[float, ...]
    end: float

    @cached_property
    def before(self) -> tuple[float, ...]:
        total = [0.0]
        for seconds in self.layers:
            total.append(total[-1] + seconds)
        return tuple(total)

    def run(self, layers: range) -> float:
        last = layers.stop == len(self.layers)
        return self.before[layers.stop] - self.before[layers.start] + (self.end if last else 0.0)


@dataclass(frozen=True)
class _Seats:
    """Devices in the order of ranks, with the width of each axis."""

    devices: tuple[int, ...]
    dp: int
    pp: int
    cp: int
    tp: int

    def at(self, replica: int, stage: int, cp: int, tp: int) -> int:
        return self.devices[((replica * self.pp + stage) * self.cp + cp) * self.tp + tp]

    def places(self, stage: int) -> list[list[int]]:
        """The devices of each place on tp, of all replicas."""
        ranks = list(product(range(self.dp), range(self.cp)))
        return [[self.at(replica, stage, cp, tp) for replica, cp in ranks] for tp in range(self.tp)]


def _least(stages: Sequence[_Cost], runs: Sequence[range], microbatches: int) -> float:
    """Seconds of a replica's step at the least."""
    pp, longest, begun = len(stages), 0.0, 0.0
    for stage, cost in enumerate(stages):
        work = sum(cost.run(run) for run in runs[stage::pp])
        longest = max(longest, begun + microbatches * (1 + BACKWARD) * work)
        begun += cost.run(runs[stage])
    return longest


def _slowest(costs: Sequence[_Cost]) -> _Cost:
    return _Cost(
        tuple(max(seconds) for seconds in zip(*(cost.layers for cost in costs), strict=True)),
        max(cost.end for cost in costs),
    )


def _led_by(first: int | None, devices: tuple[int, ...]) -> tuple[int, ...]:
    """The same order, but for one device that has the first rank."""
    return devices if first is None else (first, *(device for device in devices if device != first))


def _least_terms(numbers: Iterable[int]) -> tuple[int, ...]:
    """The same proportion in small numbers."""
    numbers = tuple(numbers)
    divisor = math.gcd(*numbers)
    return tuple(number // divisor for number in numbers)


def _axes(ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """(dp, pp, cp, tp) of that many ranks."""
    for tp in _divisors(ranks):
        for cp in _divisors(ranks // tp):
            for pp in _divisors(ranks // tp // cp):
                yield ranks // tp // cp // pp, pp, cp, tp


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def _permutations(counts: Counts) -> int:
    return math.factorial(sum(counts)) // math.prod(map(math.factorial, counts))
