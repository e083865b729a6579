"""`Cluster`: the devices that a plan may use, how fast each is (`Device`), and the links between them (`LinkSpeed`)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from tllm.core.errors import ConfigError, PlanError
from tllm.planner.cluster.execution import TLLM, Execution
from tllm.planner.cluster.failures import Failures
from tllm.planner.cluster.profile import between

SHORT_MESSAGE_BYTES = 1 << 19
"""Messages up to this size stay in the processor's caches on their way, and may have a bandwidth of their own."""

Points = tuple[tuple[float, float], ...]
"""Measured points (rows, value) in the order of rows, between which `profile.between` interpolates."""


@dataclass(frozen=True)
class Device:
    """What one rank runs on. A field of 0 or () was not measured, and costs nothing."""

    memory: int
    """Bytes."""
    flop_rates: tuple[tuple[str, Points], ...]
    """By dtype, flop/s of matrix products over rows."""
    memory_bandwidth: float
    """Bytes per second that are read from main memory: of weights, as they are held."""
    operation_seconds: float = 0.0
    """Seconds that starting one operation costs."""
    disk_bandwidth: float = 0.0
    """Bytes per second; 0: unknown."""
    peaks: tuple[tuple[str, float], ...] = ()
    """By dtype, flop/s that its maker promises, or that the fastest product of matrices reached."""
    keys_bandwidth: float = 0.0
    """Bytes per second of cached keys and values that attention reads; 0: as of weights."""
    logits_rates: tuple[tuple[str, Points], ...] = ()
    """By dtype, flop/s of logits over rows, where these differ from other products."""
    update_seconds: float = 0.0
    """Seconds that the optimizer takes for one element of the weights."""
    driver_seconds: Points = ()
    """Seconds that a driver's step takes on top of layers and logits, over sequences."""
    follower_seconds: Points = ()
    """The same on a stage that follows the driver's."""
    unplayed_seconds: float = 0.0
    """Seconds by which a layer of a few replies takes longer where its operations are called one by one, and not
    played."""
    cold_cache_seconds: float = 0.0
    """Seconds by which a stage's layers take longer in a step than repeated alone, as caches are cold."""
    after_wait_seconds: float = 0.0
    """The same where the stage had nothing to do before."""
    half_layer_rates: tuple[tuple[str, Points], ...] = ()
    """By dtype, flop/s over rows of one of two ranks that each hold half of a layer."""
    split_backward_factor: float = 1.0
    """How many times longer a training pass takes whose backward pass is split in two (zero bubble schedules)."""
    has_spare_core: bool = True
    """Whether it sends while it computes; if not, each waits for the other."""
    serving: Device | None = None
    """How fast it is when it serves, where a survey of training measured that apart; None: as here."""

    def peak(self, dtype: str) -> float:
        """Peak flop/s, of which MFU is a share: what its maker promises, or the fastest product that was measured.

        At least what its layers and logits reach, which a product that was measured in a busy moment may not.
        """
        points = (*dict(self.flop_rates)[dtype], *dict(self.logits_rates).get(dtype, ()))
        return max(dict(self.peaks).get(dtype, 0.0), *(rate for _, rate in points))

    def knows(self, dtype: str) -> bool:
        """Whether its speed in a dtype is known."""
        return dtype in dict(self.flop_rates)

    def matrix_rate(self, dtype: str, rows: float) -> float:
        """Flop/s of products with so many rows. Raises ConfigError for a dtype whose speed is not known."""
        return self._at(self.flop_rates, dtype, rows)

    def cut_rate(self, dtype: str, rows: float, part: float) -> float:
        """Flop/s of a rank that holds the share `part` of a layer.

        The fixed cost, which no cut makes less, follows from the rates of a whole layer and of half of one.
        """
        whole = self.matrix_rate(dtype, rows)
        if not self.half_layer_rates or part == 1:
            return whole
        half = self._at(self.half_layer_rates, dtype, rows)
        fixed = min(max(0.0, 1 / half - 1 / whole), 0.9 / whole)  # seconds for each flop of the whole layer
        return 1 / (fixed / part + 1 / whole - fixed)

    def logits_rate(self, dtype: str, rows: float) -> float:
        """Flop/s of logits for so many rows."""
        return self._at(self.logits_rates or self.flop_rates, dtype, rows)

    @property
    def cache_bandwidth(self) -> float:
        """Bytes per second of the cache of a model that is served."""
        return self.keys_bandwidth or self.memory_bandwidth

    def driver_step(self, sequences: float) -> float:
        """Seconds that a driver's step with so many sequences takes on top of layers and logits."""
        return between(self.driver_seconds, max(sequences, 1)) if self.driver_seconds else 0.0

    def follower_step(self, sequences: float) -> float:
        """Seconds that a step takes on top of layers and logits on a stage that follows the driver's."""
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
    hosts: tuple[str, ...] = ()
    """By node, the machine that it runs on, where several nodes may share one; else each is a machine."""

    def __len__(self) -> int:
        return len(self.devices)

    def name(self, device: int) -> str:
        """The node's, with a number where it has several devices."""
        node = self.node_of[device]
        first = self.node_of.index(node)
        return self.names[node] if self.node_of.count(node) == 1 else f"{self.names[node]}/{device - first}"

    def machines(self, devices: Sequence[int]) -> tuple[str, ...]:
        """The machine of each of these devices."""
        of_nodes = self.hosts or self.names
        return tuple(of_nodes[self.node_of[device]] for device in devices)

    def as_serving(self) -> Cluster:
        """The same devices as they serve."""
        if all(device.serving is None for device in self.devices):
            return self
        return replace(self, devices=tuple(device.serving or device for device in self.devices))

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

    def slowest_link(self, devices: Sequence[int], in_memory: bool = True) -> LinkSpeed:
        """The worst of the links among these devices: the longest latency, the least bandwidth. Unless `in_memory`,
        nothing that they sum goes through memory that they share."""
        if len(devices) < 2:
            return LinkSpeed()
        links = (self.link(a, b) for a, b in self._kinds(devices))
        return worst(links if in_memory else (link.without_memory for link in links))

    def pattern(self, devices: Sequence[int]) -> object:
        """A key that is equal for two lists of devices which are, place by place, equally fast and equally far
        apart."""
        nodes = [self.node_of[device] for device in devices]
        pairs = self._pairs
        if pairs and any((a, b) in pairs for a in set(nodes) for b in set(nodes)):
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
        """Raises ConfigError unless every device reaches every other."""
        kinds = self._kinds(range(len(self.devices)))
        for a, b in kinds:
            self.link(a, b)

    def _kinds(self, devices: Sequence[int]) -> Iterable[tuple[int, int]]:
        """Pairs of devices that include each different link between any two of them at least once."""
        if len(devices) <= 16:
            return [(a, b) for a in devices for b in devices if a != b]
        first: dict[int, int] = {}
        pairs = []
        for device in devices:
            known = first.setdefault(self.node_of[device], device)
            if known != device:
                pairs.append((known, device))
        nodes = set(first)
        pairs += [(first[a], first[b]) for (a, b), _ in self.pairs if a in nodes and b in nodes]
        # Of each group one node: it meets the other groups where the next tier joins them.
        heads = list(first.values())
        for tier in self.tiers:
            firsts: dict[int, int] = {}
            alone = []
            for device in heads:
                group = tier.group_of[self.node_of[device]]
                known = firsts.setdefault(group, device) if group >= 0 else device
                if known != device:
                    pairs.append((known, device))
                elif group < 0:
                    alone.append(device)
            heads = [*firsts.values(), *alone]
        return pairs + list(pairwise(heads))

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
    """Each name replaced by the place where it comes first; nodes in no group (below 0) are each alone."""
    first: dict[int, int] = {}
    return tuple(place if name < 0 else first.setdefault(name, place) for place, name in enumerate(names))


def worst(links: Iterable[LinkSpeed]) -> LinkSpeed:
    """The longest latency and the least bandwidth of several links; a free link where there is none.

    Of the overheads of a shared layer the upper median counts, not the largest: they are the slowest rank's, which half
    of the links or more belong to, and a median depends less on a single measurement.
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
    """One directed link: it is busy for bytes / bandwidth seconds, and what it sent arrives `latency` seconds later."""

    latency: float = 0.0
    """Seconds one way."""
    bandwidth: float = math.inf
    """Bytes per second."""
    sync_overhead: float = 0.0
    """Seconds lost in each all-reduce between ranks that compute in between, which do not arrive at the same moment.
    Below 0 where they gain some of the latency."""
    compute_overhead: float = 0.0
    """Seconds for which the sender cannot compute, for each byte that it sends and one that it receives."""
    short_bandwidth: float = 0.0
    """Bytes per second of messages up to `SHORT_MESSAGE_BYTES`; 0 where they have no bandwidth of their own."""
    layer_sync_overhead: float | None = None
    """`sync_overhead` in the all-reduces of a layer that several ranks serve, where that was measured."""
    hop_overhead: float | None = None
    """`sync_overhead` in handing a batch to the next stage when serving, where that was measured."""
    hop_bandwidth: float = 0.0
    """Bytes per second of batches that are handed to the next stage; 0 where that is the bandwidth of all messages."""
    shares_memory: bool = False
    """Whether all-reduces were measured through memory that both ends share, as all ranks of a stage on one machine use
    it."""

    @property
    def for_hops(self) -> LinkSpeed:
        """The link as it carries batches from stage to stage."""
        link = replace(self, bandwidth=self.hop_bandwidth, short_bandwidth=0.0) if self.hop_bandwidth else self
        return link.with_sync_overhead(self.hop_overhead)

    @property
    def without_memory(self) -> LinkSpeed:
        """The link as it carries sums of ranks that use no memory together: as it does batches."""
        return replace(self.for_hops, layer_sync_overhead=None) if self.shares_memory else self

    def with_sync_overhead(self, seconds: float | None) -> LinkSpeed:
        """The link with another synchronization overhead, if one is known; no message arrives before it is sent."""
        return self if seconds is None else replace(self, sync_overhead=max(seconds, -self.latency))

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
