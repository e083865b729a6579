"""Layouts of a training step over devices, as far as they are worth trying.

A layout fixes which devices are used in which order, the widths of the axes (dp, pp, cp, tp, ep), the shares of ranks,
the layers of each run, the microbatch size, and each replica's share of the microbatches. The search
(`training_search`) then tries what it leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, product

from tllm.core.errors import PlanError
from tllm.planner.cluster.device import Cluster, Device
from tllm.planner.cost.flops import BACKWARD, attention_flops, layer_flops, logits_flops
from tllm.planner.cost.grid_work import grid_microbatch
from tllm.planner.cost.rank_bytes import run_parameters
from tllm.planner.cost.rank_work import TrainingFacts, both_passes, deal_microbatches, forward_only_layers
from tllm.planner.search.device_meshes import Axes, DeviceMesh, EveryMesh
from tllm.planner.search.layer_cuts import balanced_bounds, even_bounds, lightest_bounds
from tllm.planner.search.microbatch_deals import (
    ReplicaBound,
    StageSeconds,
    balanced_deal,
    lowest_terms,
    replica_bounds,
    slowest,
)
from tllm.planner.search.promising_meshes import promising_meshes
from tllm.planner.search.stage_options import Division, whole_shares
from tllm.planner.search.training_constraints import TrainingConstraints
from tllm.spec.cut import cut_grid, cut_stage
from tllm.spec.grid.grid_shape import MODES, GridShape, TensorMode
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan, Stage

MOST_CUTS = 40
"""Cuts of the layers, and deals of the microbatches, that are all tried; of more the even and the
balanced ones, and of balanced cuts the one that shares out weights best."""

MOST_DEVICES = 16
"""Devices that are arranged in every way; of more only promising ones are looked at (`promising_meshes`)."""

MOST_LAYOUTS = 30_000
"""Of so many devices too, if they are unlike: six of which none is like another have some millions of layouts."""

CHUNKS = (1, 2, 4)

StageShares = tuple[tuple[int, ...], ...]
"""For each stage the shares of its ranks."""


@dataclass(frozen=True)
class TrainingLayout:
    """Where work is done; when it is done and what is kept where is left open."""

    plan: Plan
    devices: tuple[int, ...]
    facts: TrainingFacts
    lower_bound: float
    """Seconds that a step takes at least: each stage waits for the first microbatch and then does its own work."""
    messages: float = 0.0
    """About how many seconds more it takes for messages, where that was estimated."""

    @property
    def estimate(self) -> float:
        """About how long a step takes."""
        return self.lower_bound + self.messages


class TrainingLayouts:
    """All layouts of a model's step on a cluster; iterate over it."""

    def __init__(
        self, spec: ModelSpec, cluster: Cluster, facts: TrainingFacts, constraints: TrainingConstraints
    ) -> None:
        self.spec, self.cluster, self.facts, self.constraints = spec, cluster, facts, constraints
        self.is_exhaustive = len(cluster) <= MOST_DEVICES
        """Whether nothing was left out; final once all layouts were made."""
        self.are_many = not self.is_exhaustive
        """Whether there are so many that only promising ones are looked at."""
        numbers: dict[Device, int] = {}
        self._kinds = [numbers.setdefault(device, len(numbers)) for device in cluster.devices]
        """For each device a number that equal ones share."""
        self._stage_seconds: dict[object, StageSeconds] = {}

    def __iter__(self) -> Iterator[TrainingLayout]:
        seen, made = set[DeviceMesh](), 0
        if self.is_exhaustive:
            for mesh, layout in self._of_every_mesh():
                made += 1
                if made > MOST_LAYOUTS:
                    self.is_exhaustive, self.are_many = False, True
                    break
                seen.add(mesh)
                yield layout
            else:
                return
        for chosen in promising_meshes(self.spec, self.cluster, self.facts, self.constraints):
            if chosen.mesh not in seen:
                for layout in self._layouts(chosen.mesh, chosen.sizes):
                    yield replace(layout, messages=chosen.messages * self._largest_share(layout.plan))

    def _largest_share(self, plan: Plan) -> float:
        """The weights of the stage that has most of them over the mean."""
        runs = [sum(self._weights[run.start : run.stop]) for run in plan.runs]
        held = [sum(runs[stage :: plan.pp]) for stage in range(plan.pp)]
        return max(held) * plan.pp / sum(held)

    def _of_every_mesh(self) -> Iterator[tuple[DeviceMesh, TrainingLayout]]:
        meshes = EveryMesh(self.cluster, self._rate, self.constraints.first_device)
        for mesh in meshes:
            most_cp = 1 if self.spec.delta else self.facts.most_ranks_of_row
            if mesh.axes.pp <= self.spec.num_layers and mesh.axes.cp <= most_cp:
                for layout in self._layouts(mesh, self.constraints.microbatch_sizes):
                    yield mesh, layout
        self.is_exhaustive = self.is_exhaustive and meshes.is_exhaustive

    def _layouts(self, mesh: DeviceMesh, sizes: Sequence[int]) -> Iterator[TrainingLayout]:
        """Layouts of one choice of devices and axes, with microbatches of these sizes."""
        dp = mesh.axes.dp
        has_experts = any(layer.moe for layer in self.spec.layers)
        eps = [ep for ep in range(1, dp + 1) if dp % ep == 0] if has_experts else [1]
        for size in sizes:
            facts = replace(self.facts, microbatch_size=size)
            if facts.microbatches < dp or size > self.facts.global_batch_size:
                continue
            every = self._shares(mesh)
            ways = [(shares, Division(), ep) for shares, ep in product(every, eps)]
            ways += [(every[0], Division(tensor=mode), 1) for mode in _grids(mesh.axes)]
            for shares, division, ep in ways:
                try:
                    yield from self._with_shares(mesh, shares, division, ep, facts)
                except PlanError:
                    continue  # there are more ranks than there is to cut, or they form no such grid

    def _shares(self, mesh: DeviceMesh) -> list[StageShares]:
        """Shares to try: even ones, and those by the speed of the slowest device at each place on tp."""
        by_speed = tuple(
            whole_shares([min(map(self._rate, devices)) for devices in mesh.places(stage)])
            for stage in range(mesh.axes.pp)
        )
        return list(dict.fromkeys([((1,) * mesh.axes.tp,) * mesh.axes.pp, by_speed]))

    def _with_shares(
        self, mesh: DeviceMesh, shares: StageShares, division: Division, ep: int, facts: TrainingFacts
    ) -> Iterator[TrainingLayout]:
        """Layouts of one choice of shares, and of how they divide weights: every cut of the layers with every deal of
        the microbatches."""
        axes = mesh.axes
        costs = [
            tuple(self._stage_cost(mesh, replica, stage, shares[stage], division, facts) for stage in range(axes.pp))
            for replica in range(axes.dp)
        ]
        for chunks, runs in self._runs([slowest(replica[stage] for replica in costs) for stage in range(axes.pp)]):
            stages = tuple(Stage(run.start, run.stop, shares[i % axes.pp]) for i, run in enumerate(runs))
            bounds = replica_bounds(costs, runs)
            for dp in self._deals(bounds, facts, ep):
                schedule = "interleaved" if chunks > 1 else "1f1b"
                plan = Plan(stages, *division, dp, cp=axes.cp, ep=ep, chunks=chunks, schedule=schedule)
                counts = deal_microbatches(facts.microbatches, dp)
                bound = max(bound.seconds(count) for bound, count in dict.fromkeys(zip(bounds, counts, strict=True)))
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
        costs = [stage.layers for stage in stages] * chunks
        with_logits = [*costs[:-1], (*costs[-1][:-1], costs[-1][-1] + stages[-1].logits)]
        cuts = [even_bounds(layers, runs), balanced_bounds(costs), balanced_bounds(with_logits)]
        return list(dict.fromkeys([*cuts, lightest_bounds(with_logits, self._weights)]))

    @cached_property
    def _weights(self) -> list[float]:
        """Elements that each layer learns, with those of the model's ends."""
        (whole,) = cut_stage(self.spec, (1,))
        units = (run_parameters(self.spec, range(n, n + 1), whole, 0) for n in range(self.spec.num_layers))
        return [float(sum(one.elements for unit in run for one in unit)) for run in units]

    def _deals(self, replicas: Sequence[ReplicaBound], facts: TrainingFacts, ep: int) -> list[tuple[int, ...]]:
        """Shares of the replicas in the microbatches: all that there are if these are few; else the even ones, and
        those with which the slowest replica ends as early as possible."""
        dp, deals = len(replicas), [(1,) * len(replicas)]
        if any(replica is not replicas[0] for replica in replicas) and ep == 1:
            if math.comb(facts.microbatches - 1, dp - 1) <= MOST_CUTS:
                cuts = combinations(range(1, facts.microbatches), dp - 1)
                return [lowest_terms(b - a for a, b in pairwise((0, *inner, facts.microbatches))) for inner in cuts]
            self.is_exhaustive = False
            deals.append(lowest_terms(balanced_deal(replicas, facts.microbatches)))
        return list(dict.fromkeys(deals))

    def _stage_cost(
        self,
        mesh: DeviceMesh,
        replica: int,
        stage: int,
        shares: tuple[int, ...],
        division: Division,
        facts: TrainingFacts,
    ) -> StageSeconds:
        """What the slowest rank of a replica's stage takes for a microbatch; one object for stages that cost the
        same."""
        team = mesh.team(replica, stage)
        key = tuple(self._kinds[device] for device in team), shares, division, mesh.axes.cp, facts.microbatch_size
        if key not in self._stage_seconds:
            devices = [self._device(device) for device in team]
            self._stage_seconds[key] = self._slowest_rank(devices, shares, division.grid(len(shares)), facts)
        return self._stage_seconds[key]

    def _slowest_rank(
        self, team: Sequence[Device], shares: tuple[int, ...], shape: GridShape | None, facts: TrainingFacts
    ) -> StageSeconds:
        """What the slowest rank of a team takes for a microbatch, a third of it: as much as a forward pass, but where
        an adapter spares gradients. `team`: its devices, those of a cp rank in a row."""
        below, of_ranks = forward_only_layers(self.spec, facts), list[StageSeconds]()
        cuts = cut_stage(self.spec, shares) if shape is None else cut_grid(self.spec, shape)
        ring = len(team) // len(shares)
        facts = facts.in_ring(ring)
        for place, device in enumerate(team):
            cut = cuts[place % len(shares)]
            lengths, before, targets = facts.lengths, facts.before, facts.predicted
            if shape is not None:
                batch = grid_microbatch(facts.lengths, facts.item_bytes, shape, place)
                lengths, before, targets = tuple(batch.lengths), (), batch.target_tokens
            rate = device.matrix_rate(facts.dtype, sum(lengths) // ring) * ring
            of_kind = dict[object, tuple[float, float]]()
            for layer in self.spec.layers:
                if layer not in of_kind:
                    forward = layer_flops(self.spec, layer, cut, lengths, before) / rate
                    core = attention_flops(self.spec, layer, cut, lengths, before) / rate
                    of_kind[layer] = forward / (1 + BACKWARD), both_passes(facts, forward, core) / (1 + BACKWARD)
            logits_rate = device.logits_rate(facts.dtype, targets // ring) * ring
            logits = both_passes(facts, logits_flops(self.spec, cut, targets) / logits_rate) / (1 + BACKWARD)
            seconds = tuple(of_kind[layer][n >= below] for n, layer in enumerate(self.spec.layers))
            of_ranks.append(StageSeconds(seconds, logits))
        return slowest(of_ranks)

    def _device(self, device: int) -> Device:
        return self.cluster.devices[device]

    def _rate(self, device: int) -> float:
        """Flop/s of products with a row's tokens."""
        return self._device(device).matrix_rate(self.facts.dtype, self.facts.seq_len)


def _grids(axes: Axes) -> tuple[TensorMode, ...]:
    """The grids to try: in training one has all layers, and divides the tokens of a microbatch itself."""
    return MODES[1:] if axes.pp == axes.cp == 1 and axes.tp > 1 else ()
