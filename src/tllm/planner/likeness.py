"""Which devices of a cluster are alike: two that could change places and no plan would notice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from tllm.planner.cluster import Cluster

Counts = tuple[int, ...]
"""How many devices of each kind."""


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


def less(one: Counts, other: Counts) -> Counts:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def holds(one: Counts, other: Counts) -> bool:
    """Whether `other` can be taken from `one`."""
    return all(a >= b for a, b in zip(one, other, strict=True))


def _alike(cluster: Cluster, devices: Sequence[int], a: int, b: int) -> bool:
    if cluster.devices[a] != cluster.devices[b] or cluster.link(a, b) != cluster.link(b, a):
        return False
    others = [device for device in devices if device not in (a, b)]
    return all(
        cluster.link(a, other) == cluster.link(b, other) and cluster.link(other, a) == cluster.link(other, b)
        for other in others
    )
