"""Layouts of a training step over devices that are worth trying.

A layout fixes which devices are used in which order, the widths of the axes (dp, pp, cp, tp, ep), the shares of ranks,
the layers of each run, the microbatch size, and each replica's share of the microbatches. The search
(`training_search`) then tries what it leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, product
from typing import NamedTuple

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
"""Orders of devices that are all tried; of more only the cluster's own and those by speed."""

MOST_CUTS = 40
"""Cuts of the layers, and deals of the microbatches, that are all tried; of more the even and the balanced one."""

MOST_DEVICES = 16
"""Devices of which some may be left out; of more all are used."""

MICROBATCHES = (1, 2, 4, 8, 16, 32)
CHUNKS = (1, 2, 4)

StageShares = tuple[tuple[int, ...], ...]
"""For each stage the shares of its ranks."""


def accept(plan: Plan, facts: TrainingFacts) -> None:
    """The check that refuses no plan."""


@dataclass(frozen=True)
class TrainingConstraints:
    """What the search may not choose."""

    microbatch_sizes: tuple[int, ...] = MICROBATCHES
    first_device: int | None = None
    """The device that rank 0 must run on."""
    check: Callable[[Plan, TrainingFacts], None] = accept
    """Raises PlanError for a plan that must not be chosen."""


@dataclass(frozen=True)
class TrainingLayout:
    """Where work is done; when it is done and what is kept where is left open."""

    plan: Plan
    devices: tuple[int, ...]
    facts: TrainingFacts
    lower_bound: float
    """Seconds that a step takes at least: each stage waits for the first microbatch and then does its own work."""


class Axes(NamedTuple):
    """The number of ranks along each axis of the mesh."""

    dp: int
    pp: int
    cp: int
    tp: int


class TrainingLayouts:
    """All layouts of a model's step on a cluster; iterate over it."""

    def __init__(
        self, spec: ModelSpec, cluster: Cluster, facts: TrainingFacts, constraints: TrainingConstraints
    ) -> None:
        self.spec, self.cluster, self.facts, self.constraints = spec, cluster, facts, constraints
        self.kinds = kinds_of(cluster, range(len(cluster))) if len(cluster) <= MOST_DEVICES else []
        self.is_exhaustive = len(cluster) <= MOST_DEVICES
        """Whether nothing was left out; final once all layouts were made."""

    def __iter__(self) -> Iterator[TrainingLayout]:
        first = self.constraints.first_device
        orders = (order for order in self._orders() if first in (None, *order))
        for devices in dict.fromkeys(_led_by(first, order) for order in orders):
            for axes in _axes(len(devices)):
                most_cp = 1 if self.spec.delta else self.facts.seq_len // 2
                if axes.pp <= self.spec.num_layers and axes.cp <= most_cp:
                    yield from self._layouts(DeviceMesh(devices, axes))

    def _orders(self) -> Iterator[tuple[int, ...]]:
        """Choices of devices, in orders that cost differently."""
        if not self.kinds:
            everything = range(len(self.cluster))
            yield from dict.fromkeys([tuple(everything), self._by_speed(everything, -1)])
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

    def _permuted(self, left: Counts, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Every order of so many devices of each kind that begins with the kinds of `order`."""
        if not any(left):
            yield tuple(self.kinds[kind][order[:place].count(kind)] for place, kind in enumerate(order))
        for kind, count in enumerate(left):
            if count:
                yield from self._permuted((*left[:kind], count - 1, *left[kind + 1 :]), (*order, kind))

    def _by_speed(self, devices: Sequence[int], sign: int) -> tuple[int, ...]:
        """Devices by their rate of products: the fastest first for a `sign` of -1, last for 1."""
        return tuple(sorted(devices, key=lambda device: sign * self._rate(device)))

    def _layouts(self, mesh: DeviceMesh) -> Iterator[TrainingLayout]:
        """Layouts of one choice of devices and axes."""
        dp = mesh.axes.dp
        has_experts = any(layer.moe for layer in self.spec.layers)
        eps = [ep for ep in range(1, dp + 1) if dp % ep == 0] if has_experts else [1]
        for size in self.constraints.microbatch_sizes:
            facts = replace(self.facts, microbatch_size=size)
            if facts.microbatches < dp or size > self.facts.global_batch_size:
                continue
            for shares, ep in product(self._shares(mesh), eps):
                try:
                    yield from self._with_shares(mesh, shares, ep, facts)
                except PlanError:
                    continue  # there are more ranks than there is to cut

    def _shares(self, mesh: DeviceMesh) -> list[StageShares]:
        """Shares to try: even ones, and those by the speed of the slowest device at each place on tp."""
        by_speed = tuple(
            whole_shares([min(map(self._rate, devices)) for devices in mesh.places(stage)])
            for stage in range(mesh.axes.pp)
        )
        return list(dict.fromkeys([((1,) * mesh.axes.tp,) * mesh.axes.pp, by_speed]))

    def _with_shares(
        self, mesh: DeviceMesh, shares: StageShares, ep: int, facts: TrainingFacts
    ) -> Iterator[TrainingLayout]:
        """Layouts of one choice of shares: every cut of the layers with every deal of the microbatches."""
        axes = mesh.axes
        costs = [
            [self._stage_cost(mesh, replica, stage, shares[stage], facts) for stage in range(axes.pp)]
            for replica in range(axes.dp)
        ]
        slowest = [_slowest([replica[stage] for replica in costs]) for stage in range(axes.pp)]
        for chunks, runs in self._runs(slowest):
            stages = tuple(Stage(run.start, run.stop, shares[i % axes.pp]) for i, run in enumerate(runs))
            for dp in self._deals(costs, runs, facts, ep):
                schedule = "interleaved" if chunks > 1 else "1f1b"
                plan = Plan(stages, dp=dp, cp=axes.cp, ep=ep, chunks=chunks, schedule=schedule)
                counts = deal_microbatches(facts.microbatches, dp)
                bound = max(_lower_bound(cost, runs, count) for cost, count in zip(costs, counts, strict=True))
                yield TrainingLayout(plan, mesh.devices, facts, bound)

    def _runs(self, stages: Sequence[StageSeconds]) -> Iterator[tuple[int, list[range]]]:
        """Numbers of chunks, each with cuts of the layers into runs."""
        for chunks in CHUNKS if len(stages) > 1 else (1,):
            for bounds in self._bounds(stages, chunks):
                yield chunks, [range(start, stop) for start, stop in pairwise(bounds)]

    def _bounds(self, stages: Sequence[StageSeconds], chunks: int) -> list[tuple[int, ...]]:
        """Where runs of layers begin, and the end of the last one."""
        layers, runs = self.spec.num_layers, len(stages) * chunks
        if runs > layers:
            return []
        if math.comb(layers - 1, runs - 1) <= MOST_CUTS:
            return [(0, *inner, layers) for inner in combinations(range(1, layers), runs - 1)]
        self.is_exhaustive = False
        balanced = balanced_bounds([stage.layers for stage in stages] * chunks)
        return list(dict.fromkeys([even_bounds(layers, runs), balanced]))

    def _deals(
        self, costs: Sequence[Sequence[StageSeconds]], runs: Sequence[range], facts: TrainingFacts, ep: int
    ) -> list[tuple[int, ...]]:
        """Shares of the replicas in the microbatches: all that there are if these are few; else the even ones, and
        those with which the slowest replica ends as early as possible."""
        dp, deals = len(costs), [(1,) * len(costs)]
        if any(replica != costs[0] for replica in costs) and ep == 1:
            if math.comb(facts.microbatches - 1, dp - 1) <= MOST_CUTS:
                cuts = combinations(range(1, facts.microbatches), dp - 1)
                return [_lowest_terms(b - a for a, b in pairwise((0, *inner, facts.microbatches))) for inner in cuts]
            self.is_exhaustive = False
            counts = [1] * dp
            for _ in range(facts.microbatches - dp):
                bounds = [_lower_bound(cost, runs, count + 1) for cost, count in zip(costs, counts, strict=True)]
                counts[bounds.index(min(bounds))] += 1
            deals.append(_lowest_terms(counts))
        return list(dict.fromkeys(deals))

    def _stage_cost(
        self, mesh: DeviceMesh, replica: int, stage: int, shares: tuple[int, ...], facts: TrainingFacts
    ) -> StageSeconds:
        """What the slowest rank of a replica's stage takes for a microbatch."""
        of_ranks = []
        cuts = cut_stage(self.spec, shares)
        tokens, ring = sum(facts.lengths), mesh.axes.cp
        for cp, tp in product(range(ring), range(mesh.axes.tp)):
            device, cut = self._device(mesh.at(replica, stage, cp, tp)), cuts[tp]
            rate = device.matrix_rate(facts.dtype, tokens // ring) * ring
            of_kind: dict[object, float] = {}
            for layer in self.spec.layers:
                if layer not in of_kind:
                    of_kind[layer] = layer_flops(self.spec, layer, cut, facts.lengths) / rate
            logits_rate = device.logits_rate(facts.dtype, tokens // ring) * ring
            logits = logits_flops(self.spec, cut, tokens) / logits_rate
            of_ranks.append(StageSeconds(tuple(of_kind[layer] for layer in self.spec.layers), logits))
        return _slowest(of_ranks)

    def _device(self, device: int) -> Device:
        return self.cluster.devices[device]

    def _rate(self, device: int) -> float:
        """Flop/s of products with a row's tokens."""
        return self._device(device).matrix_rate(self.facts.dtype, self.facts.seq_len)


@dataclass(frozen=True)
class StageSeconds:
    """Forward seconds of one microbatch on the devices of one stage: through each layer of the model, and of logits."""

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


@dataclass(frozen=True)
class DeviceMesh:
    """Devices in the order of ranks, and the axes along which they are arranged."""

    devices: tuple[int, ...]
    axes: Axes

    def at(self, replica: int, stage: int, cp: int, tp: int) -> int:
        """The device at a place of the mesh."""
        axes = self.axes
        return self.devices[((replica * axes.pp + stage) * axes.cp + cp) * axes.tp + tp]

    def places(self, stage: int) -> list[list[int]]:
        """For each place on tp the devices of a stage there, over all replicas and cp ranks."""
        ranks = list(product(range(self.axes.dp), range(self.axes.cp)))
        return [[self.at(replica, stage, cp, tp) for replica, cp in ranks] for tp in range(self.axes.tp)]


def _lower_bound(stages: Sequence[StageSeconds], runs: Sequence[range], microbatches: int) -> float:
    """Seconds that a replica's step takes at least."""
    pp, longest, begun = len(stages), 0.0, 0.0
    for stage, cost in enumerate(stages):
        work = sum(cost.run_seconds(run) for run in runs[stage::pp])
        longest = max(longest, begun + microbatches * (1 + BACKWARD) * work)
        begun += cost.run_seconds(runs[stage])
    return longest


def _slowest(costs: Sequence[StageSeconds]) -> StageSeconds:
    """Layer by layer the largest cost."""
    return StageSeconds(
        tuple(max(seconds) for seconds in zip(*(cost.layers for cost in costs), strict=True)),
        max(cost.logits for cost in costs),
    )


def _led_by(first: int | None, devices: tuple[int, ...]) -> tuple[int, ...]:
    """The same order, but with the device `first` in front, if one is given."""
    return devices if first is None else (first, *(device for device in devices if device != first))


def _lowest_terms(numbers: Iterable[int]) -> tuple[int, ...]:
    """The same proportion in the smallest whole numbers."""
    numbers = tuple(numbers)
    divisor = math.gcd(*numbers)
    return tuple(number // divisor for number in numbers)


def _axes(ranks: int) -> Iterator[Axes]:
    """Every choice of axes for that many ranks."""
    for tp in _divisors(ranks):
        for cp in _divisors(ranks // tp):
            for pp in _divisors(ranks // tp // cp):
                yield Axes(ranks // tp // cp // pp, pp, cp, tp)


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def _permutations(counts: Counts) -> int:
    """How many orders there are of so many devices of each kind."""
    return math.factorial(sum(counts)) // math.prod(map(math.factorial, counts))
