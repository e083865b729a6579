"""`Execution`: what of a trainer's own ways changes how long a step takes on given machines; as it stands, tllm's.

`Cluster`: the devices that a plan may use, how fast each is, and how fast each reaches each other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from tllm.core.errors import ConfigError, PlanError
from tllm.planner.cluster.failures import Failures
from tllm.planner.cluster.profile import between

SHORT_MESSAGE_BYTES = 1 << 19

GROUPS = ("tp", "cp", "ep", "dp", "edp", "replica")


@dataclass(frozen=True)
class Execution:
    """How a step is done.

    `collectives`: each rank sends to each other ("flat"), or inside nodes first ("levels"). `overlap`: of a group's
    messages the share that travels while products are computed, where tllm waits for them; `slowdown`: how many times
    longer products take meanwhile, as both use the device (Galvatron, 2211.13878, section 3.4). `touches`: how often
    elementwise operations move, forward and backward, what a layer keeps: 5 where neighbours are fused (written and
    read forward; read, and its gradient written and read, backward), more where each operation goes through memory.
    `attention`: of the device's rate for scores what the kernel reaches. `recompute_share`: the share of a layer's forward pass
    that is worked out a second time, where a trainer does that otherwise than the plan.
    """

    collectives: Literal["flat", "levels"] = "flat"
    overlap: tuple[tuple[str, float], ...] = ()
    slowdown: float = 1.0
    touches: float = 5.0
    attention: float = 1.0
    recompute_share: float | None = None

    def __post_init__(self) -> None:
        for group, share in self.overlap:
            if group not in GROUPS or not 0 <= share <= 1:
                raise ConfigError(
                    f"beside of [execution] has {group} = {share:g}", f"give shares of 0 to 1 of {', '.join(GROUPS)}"
                )
        if not self.slowdown >= 1:
            raise ConfigError(f"slowdown of [execution] is {self.slowdown:g}", "give 1 or more: products never gain")
        if not self.touches >= 0:
            raise ConfigError(f"touches of [execution] is {self.touches:g}", "give 0 or more")
        if not 0 < self.attention <= 1:
            raise ConfigError(f"attention of [execution] is {self.attention:g}", "give a share above 0 and up to 1")
        if self.recompute_share is not None and not 0 <= self.recompute_share <= 1:
            raise ConfigError(f"again of [execution] is {self.recompute_share:g}", "give a share of 0 to 1")

    def exposed_seconds(self, group: str, messages: float, products: float) -> float:
        """Seconds that messages add to products: what is not beside them, and how much they slow them down."""
        beside = dict(self.overlap).get(group, 0.0) * messages
        return messages - beside + self.overlap_excess(beside, products)

    def overlap_excess(self, messages: float, products: float) -> float:
        """Seconds by which both together, begun at once, take longer than the products alone."""
        together = products * self.slowdown
        return messages - products if messages >= together else messages * (1 - 1 / self.slowdown)


TLLM = Execution()

Points = tuple[tuple[float, float], ...]
"""(rows, flop/s), by rows."""


@dataclass(frozen=True)
class Device:
    """What one rank runs on. `memory` in bytes, `memory_bandwidth` of main memory and `disk_bandwidth` in bytes per second (0: unknown).

    `flop_rates` are flop/s of products, by dtype, for so many rows, `logits_rates` those of logits where they are others; `peaks`
    what its maker promises. `operation_seconds`: seconds that one operation costs beside; `update_seconds`: that an optimizer takes
    for an element; `driver_seconds`: that a driver's step takes beside, by sequences, and `follower_seconds`: the step of a stage that
    follows; `cold_cache_seconds`: by which layers take longer in a step, and `after_wait_seconds`: after a wait. `half_layer_rates`: rates of a layer of
    which another rank has half; `split_backward_factor`: how much longer a training pass takes whose way back is in two halves.
    `has_spare_core`: it sends while it computes; else the one waits for the other.
    """

    memory: int
    flop_rates: tuple[tuple[str, Points], ...]
    memory_bandwidth: float
    operation_seconds: float = 0.0
    disk_bandwidth: float = 0.0
    peaks: tuple[tuple[str, float], ...] = ()
    logits_rates: tuple[tuple[str, Points], ...] = ()
    update_seconds: float = 0.0
    driver_seconds: Points = ()
    follower_seconds: Points = ()
    cold_cache_seconds: float = 0.0
    after_wait_seconds: float = 0.0
    half_layer_rates: tuple[tuple[str, Points], ...] = ()
    split_backward_factor: float = 1.0
    has_spare_core: bool = True

    def peak(self, dtype: str) -> float:
        """Flop/s that a use of the device is a share of: what its maker promises, or the most that was measured."""
        promised = dict(self.peaks).get(dtype)
        return promised if promised is not None else max(rate for _, rate in dict(self.flop_rates)[dtype])

    def matrix_rate(self, dtype: str, rows: float) -> float:
        """Flop/s of products with so many rows. ConfigError for a dtype whose speed is not known."""
        return self._at(self.flop_rates, dtype, rows)

    def cut_rate(self, dtype: str, rows: float, part: float) -> float:
        """Flop/s of so much of a layer: what no cut makes less is known from a whole one and a half."""
        whole = self.matrix_rate(dtype, rows)
        if not self.half_layer_rates or part == 1:
            return whole
        half = self._at(self.half_layer_rates, dtype, rows)
        fixed = min(max(0.0, 1 / half - 1 / whole), 0.9 / whole)  # seconds for each flop of the whole layer
        return 1 / (fixed / part + 1 / whole - fixed)

    def logits_rate(self, dtype: str, rows: float) -> float:
        """The same of logits."""
        return self._at(self.logits_rates or self.flop_rates, dtype, rows)

    def driver_step(self, sequences: float) -> float:
        """Seconds of a driver's step with so many sequences, beside layers and logits."""
        return between(self.driver_seconds, max(sequences, 1)) if self.driver_seconds else 0.0

    def follower_step(self, sequences: float) -> float:
        """The same of a stage that follows the driver's."""
        return between(self.follower_seconds, max(sequences, 1)) if self.follower_seconds else 0.0

    def _at(self, rates: tuple[tuple[str, Points], ...], dtype: str, rows: float) -> float:
        for name, points in rates:
            if name == dtype:
                return between(points, max(rows, 1))
        known = ", ".join(name for name, _ in self.flop_rates)
        raise ConfigError(f"a node has no speed in {dtype}", f"it has {known}: give {dtype} too, or take another dtype")


@dataclass(frozen=True)
class Tier:
    """Groups of nodes that reach each other by `link`: a rack, a site. `group_of[node]`, -1 for a node in none."""

    name: str
    group_of: tuple[int, ...]
    link: LinkSpeed


@dataclass(frozen=True)
class Cluster:
    """Devices in the order of nodes: `node_of[device]` is its node, which has a name and links to its own devices.

    Between nodes the first of these counts: `pairs` by (source, target), the smallest of `tiers` that holds both,
    `default`. A link's bandwidth is what one device sends at, while the others of its node do the same. `execution` and
    `failures` are for a run that is simulated.
    """

    names: tuple[str, ...]
    devices: tuple[Device, ...]
    node_of: tuple[int, ...]
    inside: tuple[LinkSpeed | None, ...]
    default: LinkSpeed | None = None
    tiers: tuple[Tier, ...] = ()
    pairs: tuple[tuple[tuple[int, int], LinkSpeed], ...] = ()
    execution: Execution = TLLM
    failures: Failures | None = None

    def __len__(self) -> int:
        return len(self.devices)

    def name(self, device: int) -> str:
        """The node's, with a number where it has several devices."""
        node = self.node_of[device]
        first = self.node_of.index(node)
        return self.names[node] if self.node_of.count(node) == 1 else f"{self.names[node]}/{device - first}"

    def link(self, source: int, target: int) -> LinkSpeed:
        """From one device to another. ConfigError where none is given."""
        a, b = self.node_of[source], self.node_of[target]
        if a == b:
            return self._given(self.inside[a], a, b)
        pair = self._pairs.get((a, b))
        if pair is not None:
            return pair
        for tier in self.tiers:
            if tier.group_of[a] == tier.group_of[b] >= 0:
                return tier.link
        return self._given(self.default, a, b)

    def slowest_link(self, devices: Sequence[int]) -> LinkSpeed:
        """The worst of what these devices reach each other by: the longest latency, the least bandwidth."""
        if len(devices) < 2:
            return LinkSpeed()
        return worst(self.link(a, b) for a, b in self._kinds(devices))

    def pattern(self, devices: Sequence[int]) -> object:
        """The same for two lists of devices that are as fast, place by place, and lie to one another alike."""
        nodes = [self.node_of[device] for device in devices]
        if any(a in nodes and b in nodes for (a, b), _ in self.pairs):
            links: object = tuple(self.link(a, b) for a in devices for b in devices if a != b)
        else:
            links = tuple(_renamed([tier.group_of[node] for node in nodes]) for tier in self.tiers)
        return (
            tuple(self.devices[device] for device in devices),
            tuple(self.inside[node] for node in nodes),
            _renamed(nodes),
            links,
        )

    def check(self) -> None:
        """ConfigError unless every device reaches every other."""
        kinds = self._kinds(range(len(self.devices)))
        for a, b in kinds:
            self.link(a, b)

    def _kinds(self, devices: Sequence[int]) -> Iterable[tuple[int, int]]:
        """Pairs of devices, among which each link between any two of them stands at least once."""
        if len(devices) <= 16:
            return [(a, b) for a in devices for b in devices if a != b]
        first: dict[int, int] = {}
        found = []
        for device in devices:
            known = first.setdefault(self.node_of[device], device)
            if known != device:
                found.append((known, device))
        nodes = set(first)
        found += [(first[a], first[b]) for (a, b), _ in self.pairs if a in nodes and b in nodes]
        # Of each group one node: it meets the other groups where the next tier joins them.
        heads = list(first.values())
        for tier in self.tiers:
            firsts: dict[int, int] = {}
            alone = []
            for device in heads:
                group = tier.group_of[self.node_of[device]]
                known = firsts.setdefault(group, device) if group >= 0 else device
                if known != device:
                    found.append((known, device))
                elif group < 0:
                    alone.append(device)
            heads = [*firsts.values(), *alone]
        return found + list(pairwise(heads))

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], LinkSpeed]:
        return dict(self.pairs)

    def _given(self, link: LinkSpeed | None, a: int, b: int) -> LinkSpeed:
        if link is None:
            between_them = "the devices of" if a == b else "nodes"
            names = self.names[a] if a == b else f"{self.names[a]} and {self.names[b]}"
            table = f"inside = {{ … }} to node {self.names[a]}" if a == b else "a table [link]"
            raise ConfigError(
                f"the cluster has no link between {between_them} {names}", f"add {table} with latency and bandwidth"
            )
        return link


def _renamed(names: Sequence[int]) -> tuple[int, ...]:
    """Names by their first places; nodes in no group are each alone."""
    first: dict[int, int] = {}
    return tuple(place if name < 0 else first.setdefault(name, place) for place, name in enumerate(names))


def worst(links: Iterable[LinkSpeed]) -> LinkSpeed:
    """The longest latency and the least bandwidth of several links; free where there is none.

    What is lost where layers are shared is the slowest rank's, of whom half the links are or more: the middle of theirs
    is less the chance of one measurement than the worst.
    """
    latency, bandwidth, meeting, effort, brief, shared = 0.0, math.inf, 0.0, 0.0, 0.0, list[float]()
    for link in links:
        latency, bandwidth = max(latency, link.latency), min(bandwidth, link.bandwidth)
        meeting, effort = max(meeting, link.sync_overhead), max(effort, link.compute_overhead)
        shared += [link.layer_sync_overhead] if link.layer_sync_overhead is not None else []
        brief = min(brief or math.inf, link.short_bandwidth) if link.short_bandwidth else brief
    return LinkSpeed(latency, bandwidth, meeting, effort, brief, statistics.median_high(shared) if shared else None)


@dataclass(frozen=True)
class LinkSpeed:
    """One directed link: busy for bytes / bandwidth (bytes per second); what it sent lands `latency` seconds later.

    `short_bandwidth`: bandwidth of messages up to `SHORT_MESSAGE_BYTES`, which caches hold on their way; 0 where it is no other.
    `sync_overhead`: seconds that ranks lose beside in each sum over it, as none is there at the same moment; below 0
    where they gain some of the `latency`. `compute_overhead`: for which the sender computes nothing, for each byte that it sends
    and takes. Of serving, None being as in a `sync_overhead`: `layer_sync_overhead` is what ranks lose in each sum of a layer that they
    share, `hop_overhead` what stages lose in giving a batch to the next.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    sync_overhead: float = 0.0
    compute_overhead: float = 0.0
    short_bandwidth: float = 0.0
    layer_sync_overhead: float | None = None
    hop_overhead: float | None = None

    def with_sync_overhead(self, lost: float | None) -> LinkSpeed:
        """The same where so much is lost in each meeting, if that is known. No message comes before it was sent."""
        return self if lost is None else replace(self, sync_overhead=max(lost, -self.latency))

    def rate(self, size: float) -> float:
        """Bytes per second of a message of so many bytes."""
        return self.short_bandwidth if self.short_bandwidth and size <= SHORT_MESSAGE_BYTES else self.bandwidth

    def __post_init__(self) -> None:
        if (
            not 0 <= self.latency < math.inf
            or not self.bandwidth > 0
            or not -self.latency <= self.sync_overhead < math.inf
        ):
            raise PlanError(
                f"a link with a latency of {self.latency} s and {self.bandwidth} bytes/s",
                "give a latency of 0 or more and a bandwidth above 0",
            )
