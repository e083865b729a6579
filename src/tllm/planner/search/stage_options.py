"""What may hold one stage of a serving plan: devices with their shares (`StageOption`), and the seconds of layers on
them under one load (`TimedOption`). How the devices of a stage divide it (`Division`) is the same in all of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from tllm.core.errors import PlanError
from tllm.planner.cluster.device import Cluster
from tllm.planner.cluster.device_kinds import Counts, Order, counts_upto, devices_for, orders_of
from tllm.planner.cost.serving_load import ExpectedBatch, ServingFacts, ServingLoad
from tllm.planner.cost.stage_team import StageTeam
from tllm.planner.cost.tensor_parallel.grid_team import GridTeam
from tllm.planner.search.microbatch_deals import lowest_terms
from tllm.spec.cut import Cut, cut_grid, cut_stage, size, width_of
from tllm.spec.grid.grid_shape import GridShape, TensorMode, grid_shape
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Experts

MOST_TEAMS = 64
"""Choices of devices, shares left aside, that are all tried; of more only those of one kind, and the fastest."""

SHARE_UNITS = 16
"""The largest share that unequal ranks are given."""

MOST_ORDERS = 720
"""Orders of a team's devices that are all tried: they decide who leads, and who gets less where parts are unequal."""


class Division(NamedTuple):
    """How the devices of a stage divide its weights: two fields of a `Plan`."""

    experts: Experts = "cut"
    tensor: TensorMode = "1d"

    def grid(self, ranks: int) -> GridShape | None:
        """The grid that so many devices form; None for one, and where weights are cut one way. Raises PlanError where
        they form none."""
        return None if ranks == 1 else grid_shape(self.tensor, ranks)


@dataclass
class StageOption:
    """Devices that may hold a stage together. `counts`: how many of each kind; `order`: the kind of each rank's device,
    the first of which leads the stage."""

    counts: Counts
    order: Order
    shares: tuple[int, ...]
    team: StageTeam
    _stops: dict[int, int] = field(default_factory=dict)
    _timed: dict[tuple[ExpectedBatch, ExpectedBatch], TimedOption] = field(default_factory=dict)

    def max_stop(self, start: int) -> int:
        """The layer before which a stage that starts at `start` must stop for the team's memory, the logits not
        counted."""
        if start not in self._stops:
            # What follows a layer fits without it, too.
            stop, num_layers = max(start, self._stops.get(start - 1, start)), self.team.spec.num_layers
            while stop < num_layers and self.team.fits(range(start, stop + 1), end=False):
                stop += 1
            self._stops[start] = stop
        return self._stops[start]

    @property
    def max_layers(self) -> int:
        """Layers that have room, wherever they start."""
        return max(self.max_stop(start) - start for start in range(self.team.spec.num_layers))

    def timed(self, load: ServingLoad) -> TimedOption:
        """The option under a load; rings of several lengths may share the same batches, and so the same times."""
        batches = load.prefill, load.decode
        if batches not in self._timed:
            self._timed[batches] = self._time(load)
        return self._timed[batches]

    def _time(self, load: ServingLoad) -> TimedOption:
        team, layers = self.team, self.team.spec.layers
        prefill, decode = (
            tuple(accumulate((team.layer_time(layer, batch).seconds for layer in layers), initial=0.0))
            for batch in (load.prefill, load.decode)
        )
        ends = {
            (first, last): (
                team.ends_time(first, last, load.prefill).seconds,
                team.ends_time(first, last, load.decode).seconds,
            )
            for first in (False, True)
            for last in (False, True)
        }
        return TimedOption(self, sum(self.counts), prefill, decode, _cheapest(prefill), _cheapest(decode), ends)


@dataclass(frozen=True, eq=False)
class TimedOption:
    """An option under a load, with the seconds of a chunk of prompts (prefill) and of a batch in a decode step."""

    option: StageOption
    device_count: int
    prefill: tuple[float, ...]
    """Seconds of the layers before each layer, 0 first: those of layers [a, b) are prefill[b] - prefill[a]."""
    decode: tuple[float, ...]
    cheapest_prefill: float
    """Seconds of the cheapest layer."""
    cheapest_decode: float
    ends: dict[tuple[bool, bool], tuple[float, float]]
    """Seconds of (prefill, decode) at the model's ends, by whether the stage has its (first, last) layer."""


def options_of(
    spec: ModelSpec, cluster: Cluster, facts: ServingFacts, kinds: Sequence[Sequence[int]], division: Division
) -> tuple[list[StageOption], bool]:
    """Every option in which some layer fits; and whether no other was left out because there are too many."""
    whole = tuple(map(len, kinds))
    sizes = {ranks for ranks in range(1, sum(whole) + 1) if _can_divide(spec, division, ranks)}
    counts = [team for team in counts_upto(whole, sum(whole)) if sum(team) in sizes]
    is_exhaustive = len(counts) <= MOST_TEAMS
    if not is_exhaustive:
        speeds = [cluster.devices[kind[0]].memory_bandwidth for kind in kinds]
        counts = [team for team in counts if max(team) == sum(team) or _is_fastest(team, whole, speeds)]
    options: list[StageOption] = []
    for team_counts in counts:
        orders, are_all = orders_of(team_counts, MOST_ORDERS)
        is_exhaustive = is_exhaustive and are_all
        for order, shares, cuts in _unlike(spec, cluster, facts, kinds, orders, division):
            devices, shape = devices_for(kinds, order), division.grid(len(order))
            if shape is None:
                team = StageTeam(spec, cluster, devices, cuts, facts)
            else:
                team = GridTeam(spec, cluster, devices, shape, facts)
            option = StageOption(team_counts, order, shares, team)
            if option.max_layers:
                options.append(option)
    return options, is_exhaustive


def _can_divide(spec: ModelSpec, division: Division, ranks: int) -> bool:
    """Whether so many devices of a stage can divide it so. One that has it alone can always."""
    if ranks == 1 or division.tensor == "1d":
        return True  # shares decide what is cut
    try:
        shape = division.grid(ranks)
        return shape is not None and len(cut_grid(spec, shape)) == ranks
    except PlanError:
        return False


def _unlike(
    spec: ModelSpec,
    cluster: Cluster,
    facts: ServingFacts,
    kinds: Sequence[Sequence[int]],
    orders: Iterable[Order],
    division: Division,
) -> Iterator[tuple[Order, tuple[int, ...], tuple[Cut, ...]]]:
    """Orders of a team's kinds with shares and what these cut, without those that cost the same as an earlier one.

    They cost the same where the same kind leads and each kind gets parts of the same size.
    """
    seen = set[object]()
    for order in orders:
        shape = division.grid(len(order))
        tried = [(1,) * len(order)] if shape else shares_of(cluster, devices_for(kinds, order), facts)
        for shares in tried:
            try:
                cuts = cut_grid(spec, shape) if shape else cut_stage(spec, shares, division.experts)
            except PlanError:
                continue  # there are more ranks than there is to cut
            widths = [size(width_of(spec.hidden_size, shape, place)) for place in range(len(order))]
            sizes = [(*_sizes(cut), width) for cut, width in zip(cuts, widths, strict=True)]
            parts = order[0], tuple(sorted((kind, *part) for kind, part in zip(order, sizes, strict=True)))
            if parts not in seen:
                seen.add(parts)
                yield order, shares, cuts


def _sizes(cut: Cut) -> tuple[int, ...]:
    """The size of a rank's part of each axis that is cut."""
    parts = cut.heads, cut.kv_heads, cut.width, cut.experts, cut.expert_width, cut.shared_width, cut.vocab
    return tuple(map(size, parts))


def _is_fastest(team: Counts, whole: Counts, speeds: Sequence[float]) -> bool:
    """Whether a team is made of all devices that are as fast as its slowest one."""
    slowest = min(speed for speed, count in zip(speeds, team, strict=True) if count)
    return all(
        count == (there if speed >= slowest else 0) for count, there, speed in zip(team, whole, speeds, strict=True)
    )


def shares_of(cluster: Cluster, devices: Sequence[int], facts: ServingFacts) -> list[tuple[int, ...]]:
    """Shares to try: even; in proportion to memory bandwidth, to the rate of products, to memory."""
    each = [cluster.devices[device] for device in devices]
    rates = [device.matrix_rate(facts.dtype, facts.prompt) for device in each]
    tried = [(1,) * len(each)]
    for amounts in ([device.memory_bandwidth for device in each], rates, [float(device.memory) for device in each]):
        tried.append(whole_shares(amounts))
    return list(dict.fromkeys(tried))


def whole_shares(amounts: Sequence[float]) -> tuple[int, ...]:
    """Small whole numbers in about the proportion of `amounts`."""
    return lowest_terms(max(1, round(SHARE_UNITS * amount / max(amounts))) for amount in amounts)


def _cheapest(sums: Sequence[float]) -> float:
    """The cheapest layer, given the sums over the layers before each."""
    return min(b - a for a, b in pairwise(sums))
