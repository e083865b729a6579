"""Which devices of a cluster are alike: two that could change places and no plan would notice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from tllm.planner.cluster.device import Cluster

Counts = tuple[int, ...]
"""How many devices of each kind."""

Order = tuple[int, ...]
"""The kind of each rank's device."""


def kinds_of(cluster: Cluster, devices: Sequence[int]) -> list[list[int]]:
    """The devices by kind: those of one kind are equally fast and reach every other device, and each other, alike."""
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
    """Every order of so many devices of each kind; of more than `most` one for each kind that may lead. And whether
    these are all."""
    everything = math.factorial(sum(counts)) // math.prod(map(math.factorial, counts)) <= most
    if everything:
        return list(_orders(counts)), True
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    return [(kind, *kinds[: (at := kinds.index(kind))], *kinds[at + 1 :]) for kind in dict.fromkeys(kinds)], False


def devices_for(kinds: Sequence[Sequence[int]], order: Order) -> tuple[int, ...]:
    """Devices for ranks of these kinds, each kind's from its beginning."""
    left = [iter(kind) for kind in kinds]
    return tuple(next(left[kind]) for kind in order)


def minus(one: Counts, other: Counts) -> Counts:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def contains(one: Counts, other: Counts) -> bool:
    """Whether `other` can be taken from `one`."""
    return all(a >= b for a, b in zip(one, other, strict=True))


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
