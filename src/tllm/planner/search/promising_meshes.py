"""The meshes of a large cluster that are worth timing.

There are too many devices to try all orders. First an estimate of the step chooses which devices to leave out, the axes
and the microbatch size. The best choices are then laid out over devices in a few orders, by speed, site and memory.

The estimate, of R flop/s of all devices that are used, for M microbatches of F flops (forward) over dp replicas:

    products     3 F (M + dp / 2) / R       half a microbatch for each replica, as microbatches are whole
    bubble       3 F (pp - 1) dp / R / 3    a third of that of 1F1B, as zero bubble schedules have
                                            (Qi et al., 2401.10241)
    whole layers  the products by the most layers of a stage, over the mean
    messages     of layers (tp, cp) waited for; of gradients and weights beside the products (ZeRO 3), or after them
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from tllm.planner.cluster.device import Cluster, LinkSpeed, worst
from tllm.planner.cluster.device_kinds import best_bandwidths, sites_of
from tllm.planner.cost.flops import BACKWARD, layer_flops, logits_flops
from tllm.planner.cost.message_time import sending_seconds
from tllm.planner.cost.messages.collective_bytes import all_reduce
from tllm.planner.cost.rank_bytes import run_parameters
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.search.device_meshes import Axes, DeviceMesh
from tllm.planner.search.training_constraints import TrainingConstraints
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import ModelSpec

CHOSEN = 24
"""Choices of axes, with devices and a microbatch size, that are laid out."""

LEVELS = 3
"""Sets of devices by their best link, and as many by their memory."""

WIDTHS = (1, 2, 4, 8, 16)
"""Ranks over tp and over cp that are tried."""


ROUNDING = 1e-9
"""By so much of itself a speed may be off."""


@dataclass(frozen=True)
class SizedMesh:
    """A mesh, and the microbatch sizes to try on it."""

    mesh: DeviceMesh
    sizes: tuple[int, ...]
    messages: float
    """About how many seconds of a step are lost to messages."""


class _Choice(NamedTuple):
    seconds: float
    """The estimate."""
    messages: float
    """What messages take of it."""
    group: int
    """The number of the set of devices."""
    axes: Axes
    size: int


def promising_meshes(
    spec: ModelSpec, cluster: Cluster, facts: TrainingFacts, constraints: TrainingConstraints
) -> list[SizedMesh]:
    """The meshes, those of the best estimates first."""
    groups = [DeviceGroup(cluster, facts, devices) for devices in _groups(cluster, constraints.first_device)]
    estimate = StepEstimate(spec, facts)
    choices = [
        _Choice(*estimate.seconds(group, axes, size), number, axes, size)
        for number, group in enumerate(groups)
        for size in constraints.microbatch_sizes
        if size <= facts.global_batch_size
        for axes in _axes(spec, facts, len(group.devices), -(-facts.global_batch_size // size))
    ]
    best: dict[tuple[int, Axes], list[_Choice]] = {}
    for choice in sorted(choices):
        known = best.get((choice.group, choice.axes))
        if known is not None:
            known.append(choice)
        elif len(best) < CHOSEN:
            best[choice.group, choice.axes] = [choice]
    meshes = list[SizedMesh]()
    for (number, axes), sized in best.items():
        sizes = tuple(choice.size for choice in sized if choice.seconds <= 1.5 * sized[0].seconds)[:2]
        messages = sized[0].messages
        orders = groups[number].orders(axes, constraints, estimate.first_share(axes.pp))
        meshes += [SizedMesh(DeviceMesh(order, axes), sizes, messages) for order in orders]
    return meshes


def _groups(cluster: Cluster, first: int | None) -> list[tuple[int, ...]]:
    """Sets of devices: all, those with the best links, and those with the most memory."""
    everything = range(len(cluster))
    links = best_bandwidths(cluster)
    memory = [float(device.memory) for device in cluster.devices]
    groups = [tuple(everything)]
    for amounts in (links, memory):
        levels = sorted(set(amounts))
        for level in (levels[len(levels) * part // (LEVELS + 1)] for part in range(1, LEVELS + 1)):
            groups.append(tuple(device for device in everything if amounts[device] >= level or device == first))
    return list(dict.fromkeys(groups))


def _axes(spec: ModelSpec, facts: TrainingFacts, devices: int, microbatches: int) -> Iterator[Axes]:
    """Axes over as many of the devices as they divide."""
    most_cp = 1 if spec.delta else facts.most_ranks_of_row
    for tp in (tp for tp in WIDTHS if tp <= min(spec.num_heads, devices)):
        for cp in (cp for cp in WIDTHS if cp <= most_cp and tp * cp <= devices):
            for pp in range(1, min(spec.num_layers, devices // (tp * cp)) + 1):
                yield Axes(min(devices // (tp * cp * pp), microbatches), pp, cp, tp)


class DeviceGroup:
    """Devices that may be used together, and the orders in which they may be arranged."""

    def __init__(self, cluster: Cluster, facts: TrainingFacts, devices: tuple[int, ...]) -> None:
        self.cluster, self.devices = cluster, devices
        self._rates = [device.matrix_rate(facts.dtype, facts.seq_len) for device in cluster.devices]
        sites = sites_of(cluster)
        # Devices that are alike stand next to one another, so that many replicas are alike.
        keys = [
            (-rate, -device.memory, site, node)
            for rate, device, site, node in zip(self._rates, cluster.devices, sites, cluster.node_of, strict=True)
        ]
        self._by_speed = sorted(devices, key=keys.__getitem__)
        self._near = sorted(devices, key=lambda device: (sites[device], keys[device]))
        self._sums = [0.0, *accumulate(self._rates[device] for device in self._by_speed)]
        self._links: dict[int, LinkSpeed] = {}

    def rate(self, count: int) -> float:
        """Flop/s of the fastest so many devices together."""
        return self._sums[count]

    def link(self, ranks: int) -> LinkSpeed:
        """The slowest link inside any group of so many ranks, if groups are as near as they can be."""
        if ranks not in self._links:
            groups = [self._near[at : at + ranks] for at in range(0, len(self._near), ranks)]
            self._links[ranks] = worst(map(self.cluster.slowest_link, groups))
        return self._links[ranks]

    @cached_property
    def widest(self) -> LinkSpeed:
        """The slowest link among all."""
        return self.cluster.slowest_link(self.devices)

    def orders(self, axes: Axes, constraints: TrainingConstraints, first_share: float = 1.0) -> list[tuple[int, ...]]:
        """Orders for ranks: each replica's devices next to one another by speed, or by site and then speed; or each
        stage's by speed or memory, so that the stages of all replicas are unlike in the same way; or by speed, but for
        a slower device as first stage, where that has no more than `first_share` of the largest stage's work."""
        count, team, first = math.prod(axes), axes.cp * axes.tp, constraints.first_device
        by_speed = self._by_speed[:count]
        used = set(by_speed)
        orders = [tuple(by_speed), tuple(device for device in self._near if device in used)]
        if axes.pp > 1:
            by_memory = sorted(by_speed, key=lambda device: -self.cluster.devices[device].memory)
            orders += [_by_stages(order, axes, team) for order in (by_speed, by_speed[::-1], by_memory)]
            if team == 1 and first_share < 1:
                orders.append(self._with_slower_first(axes, first_share))
        led = (order if first is None else _led_by(first, order) for order in orders)
        return list(dict.fromkeys(led))

    def _with_slower_first(self, axes: Axes, share: float) -> tuple[int, ...]:
        """The fastest devices by replicas, each of which is led by the slowest one left that its first stage does not
        wait for: that is at least `share` times as fast as the slowest of the others."""
        left, order = list(self._by_speed), list[int]()
        for _ in range(axes.dp):
            others = left[: axes.pp - 1]
            enough = share * self._rates[others[-1]] * (1 - ROUNDING)
            slower = (place for place in range(axes.pp - 1, len(left)) if self._rates[left[place]] >= enough)
            place = max(slower, default=axes.pp - 1)
            order += [left[place], *others]
            left = [*left[axes.pp - 1 : place], *left[place + 1 :]]
        return tuple(order)


def _by_stages(order: Sequence[int], axes: Axes, team: int) -> tuple[int, ...]:
    """The first devices for the first stage of all replicas, the next for the second, and so on."""
    return tuple(
        order[(stage * axes.dp + replica) * team + place]
        for replica in range(axes.dp)
        for stage in range(axes.pp)
        for place in range(team)
    )


def _led_by(first: int, order: tuple[int, ...]) -> tuple[int, ...]:
    """The order with `first` in front, in exchange for the device there; one that is not used takes its place."""
    if order[0] == first:
        return order
    return (first, *(order[0] if device == first else device for device in order[1:]))


class StepEstimate:
    """About how long a step takes (see the module)."""

    def __init__(self, spec: ModelSpec, facts: TrainingFacts) -> None:
        self.spec, self.facts = spec, facts
        (whole,) = cut_stage(spec, (1,))
        self._layers = sum(
            layer_flops(spec, layer, whole, facts.documents or (facts.seq_len,)) for layer in spec.layers
        )
        self._logits = logits_flops(spec, whole, facts.seq_len)
        units = run_parameters(spec, range(spec.num_layers), whole, 0)
        learned = [parameter for unit in units for parameter in unit]
        self._elements = sum(parameter.elements for parameter in learned)
        self._gradient_share = facts.gradient_share(learned, spec.hidden_size)

    def seconds(self, group: DeviceGroup, axes: Axes, size: int) -> tuple[float, float]:
        """The estimate for microbatches of so many rows, and what messages take of it."""
        dp, pp = axes.dp, axes.pp
        microbatches = -(-self.facts.global_batch_size // size)
        flops = (1 + BACKWARD) * size * (self._layers + self._logits)
        rate = group.rate(math.prod(axes))
        of_one = flops * dp / rate  # on one replica
        products = (microbatches / dp + (0.5 if dp > 1 else 0)) * of_one * self._uneven(pp)
        waits = microbatches / dp * self._waits(group, axes, size)
        work = products + (pp - 1) * of_one / 3
        seconds = self._with_gradients(group, axes, work + waits)
        return seconds, seconds - work

    def _uneven(self, pp: int) -> float:
        """The work of the largest stage over the mean, if all stages are equally fast."""
        layers, logits = self.spec.num_layers, self._logits * self.spec.num_layers / self._layers
        each = (layers + logits) / pp
        return max(1.0, math.ceil((layers - max(0.0, each - logits)) / (pp - 1)) / each) if pp > 1 else 1.0

    def first_share(self, pp: int) -> float:
        """The work of the first stage over that of the largest, if all others have as many layers as the largest: the
        first is to have few, as it has the embedding too."""
        layers, logits = self.spec.num_layers, self._logits * self.spec.num_layers / self._layers
        largest = self._uneven(pp) * (layers + logits) / pp
        last = max(1, math.floor(largest - logits))
        return min(1.0, max(1.0, layers - (pp - 2) * math.floor(largest) - last) / largest) if pp > 1 else 1.0

    def _waits(self, group: DeviceGroup, axes: Axes, size: int) -> float:
        """Seconds for which the layers of a stage wait for messages of one microbatch."""
        _, pp, cp, tp = axes
        layers, seconds = self.spec.num_layers / pp, 0.0
        nbytes = size * self.facts.seq_len // cp * self.spec.hidden_size * self.facts.item_bytes
        if tp > 1:
            sent = all_reduce(nbytes // self.facts.item_bytes, self.facts.item_bytes, 0, tp)
            seconds += 4 * layers * sending_seconds(sent, group.link(tp), 1)
        if cp > 1:
            keys = 2 * nbytes * self.spec.num_kv_heads * self.spec.head_dim // self.spec.hidden_size // tp
            seconds += (cp - 1) * 3 * layers * sending_seconds(keys, group.link(cp * tp), 1)
        return seconds

    def _with_gradients(self, group: DeviceGroup, axes: Axes, work: float) -> float:
        """The work of a step and what it waits for the replicas' gradients, and their weights. Of a pipeline ZeRO 3
        gathers weights for each microbatch, which is left out here. Without ZeRO gradients go both ways, as they travel
        (compressed, or late); with it weights come back."""
        ranks = axes.dp * axes.cp
        if ranks == 1:
            return work
        elements, facts = self._elements / (axes.pp * axes.tp) * (ranks - 1) / ranks, self.facts
        scattered = sending_seconds(elements * facts.full_precision_bytes * self._gradient_share, group.widest)
        gathered = sending_seconds(elements * facts.learned_bytes, group.widest)
        if facts.local:
            return work + 2 * scattered / facts.local_steps
        if facts.late:
            return min(max(work, scattered) + gathered, max(work, 2 * scattered))
        after = work + scattered + min(gathered, scattered)
        return min(after, max(work, 2 * gathered) + scattered) if axes.pp == 1 else after
