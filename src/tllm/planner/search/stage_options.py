"""What may hold one stage when serving: devices together, with their shares, and what layers take on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from tllm.core.errors import PlanError
from tllm.planner.cluster.alike import Counts, Order, counts_upto, devices_for, orders_of
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.serving_load import ExpectedBatch, ServingFacts, ServingLoad
from tllm.planner.cost.stage_team import StageTeam, single_stage_plan
from tllm.spec.cut import Cut, cut_stage, size
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Experts

MOST_TEAMS = 64
"""Teams, shares left aside, that are all looked at; of more only those of one kind, and the fastest of all kinds."""

SHARE_UNITS = 16
"""The largest share of ranks that are unequal."""


MOST_ORDERS = 720
"""Orders of a team's devices that are all looked at: who leads, and who gets the less where parts are not equal."""


@dataclass
class StageOption:
    """So many devices of each kind, in an order, with shares."""

    counts: Counts
    order: Order
    shares: tuple[int, ...]
    team: StageTeam
    reaches: dict[int, int] = field(default_factory=dict)
    times: dict[tuple[ExpectedBatch, ExpectedBatch], TimedOption] = field(default_factory=dict)

    def reach(self, start: int) -> int:
        """Where layers from `start` must stop for the memory of the team, the model's end not counted."""
        if start not in self.reaches:
            stop, most = start, self.team.spec.num_layers
            while stop < most and self.team.fits(range(start, stop + 1), end=False):
                stop += 1
            self.reaches[start] = stop
        return self.reaches[start]

    @property
    def most(self) -> int:
        """Layers at the most, wherever they start."""
        return max(self.reach(0), self.reach(1) - 1)

    def timed(self, load: ServingLoad) -> TimedOption:
        """What batches of this load take: rings of several lengths may have the same."""
        batches = load.prefill, load.decode
        if batches not in self.times:
            self.times[batches] = self._timed(load)
        return self.times[batches]

    def _timed(self, load: ServingLoad) -> TimedOption:
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
        return TimedOption(self, sum(self.counts), prefill, decode, _least(prefill), _least(decode), ends)


@dataclass(frozen=True, eq=False)
class TimedOption:
    """An option under a load. Seconds of a chunk of prompts and of a token's batch, summed over the layers before each;
    `least`: of the cheapest layer; `ends`: of the model's (first, last) end."""

    option: StageOption
    size: int
    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    least_prefill: float
    least_decode: float
    ends: dict[tuple[bool, bool], tuple[float, float]]


def options_of(
    spec: ModelSpec, cluster: Cluster, facts: ServingFacts, kinds: Sequence[Sequence[int]], experts: Experts
) -> tuple[list[StageOption], bool]:
    """Every option in which some layer fits; and whether these are all."""
    whole = tuple(map(len, kinds))
    counts = list(counts_upto(whole, sum(whole)))
    everything = len(counts) <= MOST_TEAMS
    if not everything:
        speeds = [cluster.devices[kind[0]].memory_bandwidth for kind in kinds]
        counts = [one for one in counts if max(one) == sum(one) or _is_fastest(one, whole, speeds)]
    found = []
    for one in counts:
        orders, are_all = orders_of(one, MOST_ORDERS)
        everything = everything and are_all
        for order, shares in _unlike(spec, cluster, facts, kinds, orders, experts):
            team = StageTeam(
                spec, cluster, devices_for(kinds, order), single_stage_plan(shares, spec.num_layers, experts), 0, facts
            )
            option = StageOption(one, order, shares, team)
            if option.most:
                found.append(option)
    return found, everything


def _unlike(
    spec: ModelSpec,
    cluster: Cluster,
    facts: ServingFacts,
    kinds: Sequence[Sequence[int]],
    orders: Iterable[Order],
    experts: Experts,
) -> Iterator[tuple[Order, tuple[int, ...]]]:
    """Orders of a team with shares, but those where the same kind leads and each kind gets the same parts."""
    seen = set[object]()
    for order in orders:
        for shares in shares_of(cluster, devices_for(kinds, order), facts):
            try:
                cuts = cut_stage(spec, shares, experts)
            except PlanError:
                continue  # there are more ranks than there is to cut
            parts = order[0], tuple(sorted((kind, *_sizes(cut)) for kind, cut in zip(order, cuts, strict=True)))
            if parts not in seen:
                seen.add(parts)
                yield order, shares


def _sizes(cut: Cut) -> tuple[int, ...]:
    """Of its part of each axis."""
    parts = cut.heads, cut.kv_heads, cut.width, cut.experts, cut.expert_width, cut.shared_width, cut.vocab
    return tuple(map(size, parts))


def _is_fastest(one: Counts, whole: Counts, speeds: Sequence[float]) -> bool:
    """Whether these are all devices that are as fast as the slowest of them."""
    slowest = min(speed for speed, count in zip(speeds, one, strict=True) if count)
    return all(
        count == (there if speed >= slowest else 0) for count, there, speed in zip(one, whole, speeds, strict=True)
    )


def shares_of(cluster: Cluster, devices: Sequence[int], facts: ServingFacts) -> list[tuple[int, ...]]:
    """Shares worth a look: even; by the speed of reading, of products; by memory."""
    each = [cluster.devices[device] for device in devices]
    rates = [device.matrix_rate(facts.dtype, facts.prompt) for device in each]
    found = [(1,) * len(each)]
    for amounts in ([device.memory_bandwidth for device in each], rates, [float(device.memory) for device in each]):
        found.append(whole_shares(amounts))
    return list(dict.fromkeys(found))


def whole_shares(amounts: Sequence[float]) -> tuple[int, ...]:
    """Small whole numbers in about the proportion of `amounts`."""
    numbers = [max(1, round(SHARE_UNITS * amount / max(amounts))) for amount in amounts]
    divisor = math.gcd(*numbers)
    return tuple(number // divisor for number in numbers)


def _least(sums: Sequence[float]) -> float:
    """The cheapest layer, of sums over the layers before each."""
    return min(b - a for a, b in pairwise(sums))
