"""Kinds of devices: those of one kind can be exchanged without a change of any plan's cost. Also which devices are near
one another, and how well connected each is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

from tllm.planner.cluster.device import Cluster

Counts = tuple[int, ...]
"""How many devices of each kind."""

Order = tuple[int, ...]
"""The kind of each rank's device."""


def kinds_of(cluster: Cluster, devices: Sequence[int]) -> list[list[int]]:
    """The devices by kind: those of one kind are equally fast and have equal links to every other device."""
    kinds: list[list[int]] = []
    for device in devices:
        for kind in kinds:
            if all(_alike(cluster, devices, device, other) for other in kind):
                kind.append(device)
                break
        else:
            kinds.append([device])
    return kinds


def counts_upto(most: Counts, size: int) -> Iterator[Counts]:
    """Every choice of 1 to `size` devices, as counts by kind."""
    for counts in product(*(range(min(count, size) + 1) for count in most)):
        if 1 <= sum(counts) <= size:
            yield counts


def orders_of(counts: Counts, most: int) -> tuple[list[Order], bool]:
    """Every order of so many devices of each kind, and True; where there are more than `most`, one order for each kind
    that may lead, and False."""
    is_exhaustive = math.factorial(sum(counts)) // math.prod(map(math.factorial, counts)) <= most
    if is_exhaustive:
        return list(_orders(counts)), True
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    return [(kind, *kinds[: (at := kinds.index(kind))], *kinds[at + 1 :]) for kind in dict.fromkeys(kinds)], False


def devices_for(kinds: Sequence[Sequence[int]], order: Order) -> tuple[int, ...]:
    """The devices for ranks of these kinds, taken from the beginning of each kind."""
    left = [iter(kind) for kind in kinds]
    return tuple(next(left[kind]) for kind in order)


def minus(counts: Counts, taken: Counts) -> Counts:
    """What is left of `counts` without `taken`."""
    return tuple(a - b for a, b in zip(counts, taken, strict=True))


def contains(counts: Counts, wanted: Counts) -> bool:
    """Whether `wanted` can be taken from `counts`."""
    return all(a >= b for a, b in zip(counts, wanted, strict=True))


def sites_of(cluster: Cluster) -> list[tuple[int, ...]]:
    """For each device its group in each tier, the largest tier first: devices in order of it stand near one another."""
    return [tuple(tier.group_of[node] for tier in reversed(cluster.tiers)) for node in cluster.node_of]


def best_bandwidths(cluster: Cluster) -> list[float]:
    """For each device the bandwidth in bytes per second of its best link to another node; 0 where there is none."""
    nodes = range(len(cluster.names))
    best = [cluster.default.bandwidth if cluster.default is not None and len(nodes) > 1 else 0.0 for _ in nodes]
    for tier in cluster.tiers:
        sizes = Counter(tier.group_of)
        for node, group in enumerate(tier.group_of):
            if group >= 0 and sizes[group] > 1:
                best[node] = max(best[node], tier.link.bandwidth)
    for (source, _), link in cluster.pairs:
        best[source] = max(best[source], link.bandwidth)
    return [best[node] for node in cluster.node_of]


def _orders(counts: Counts) -> Iterator[Order]:
    if not any(counts):
        yield ()
    for kind, count in enumerate(counts):
        if count:
            for rest in _orders((*counts[:kind], count - 1, *counts[kind + 1 :])):
                yield (kind, *rest)


def _alike(cluster: Cluster, devices: Sequence[int], a: int, b: int) -> bool:
    if cluster.devices[a] != cluster.devices[b] or cluster.link(a, b) != cluster.link(b, a):
        return False
    others = [device for device in devices if device not in (a, b)]
    return all(
        cluster.link(a, other) == cluster.link(b, other) and cluster.link(other, a) == cluster.link(other, b)
        for other in others
    )
