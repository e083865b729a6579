"""Collectives over a hierarchy of links: inside nodes, then between nodes of a group, then between groups.

An all-gather or reduce-scatter of S bytes over n ranks moves (n - 1) / n S bytes for each rank. A hierarchical one, on
groups of w ranks and then on v such groups, is done inside the groups first, so that all ranks of a group share what
crosses the slower link between groups. In seconds, with bandwidths B in bytes per second:

    flat            (n - 1) / n S / (the slowest B)
    hierarchical    (w - 1) / w S / B_1  +  (v - 1) / v S / (w B_2)  +  …

An all-reduce is a reduce-scatter and an all-gather. An all-to-all (tokens to experts) gains nothing by a hierarchy:
each link carries what goes to ranks beyond it, all links at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tllm.planner.cluster.device import Cluster, LinkSpeed, worst


class Level(NamedTuple):
    """`width` groups of the level below communicate over `link`; each has `below` ranks at least."""

    width: int
    below: int
    link: LinkSpeed


def levels(cluster: Cluster, devices: Sequence[int]) -> list[Level]:
    """The levels that these devices span, from the inside out. Of unequal groups the widest and the smallest count."""
    keys = [tuple(_groups(cluster, device)) for device in devices]
    spanned, below = list[Level](), 1
    for depth in range(len(keys[0])):
        inner = [key[depth - 1] if depth else place for place, key in enumerate(keys)]
        members: dict[object, dict[object, int]] = {}
        for key, part in zip(keys, inner, strict=True):
            members.setdefault(key[depth], {}).setdefault(part, len(members))
        width = max(map(len, members.values()))
        if width > 1:
            firsts = {part: place for place, part in reversed(list(enumerate(inner)))}
            pairs = [
                (devices[firsts[a]], devices[firsts[b]])
                for group in members.values()
                for a, b in zip(list(group), [*list(group)[1:], next(iter(group))], strict=True)
                if a != b
            ]
            spanned.append(Level(width, below, worst(cluster.link(a, b) for a, b in pairs)))
        sizes: dict[object, int] = {}
        for key in keys:
            sizes[key[depth]] = sizes.get(key[depth], 0) + 1
        below = min(sizes.values())
    return spanned


def gather_link(cluster: Cluster, devices: Sequence[int]) -> LinkSpeed:
    """One link over which (n - 1) / n of the bytes take as long as a hierarchical all-gather does."""
    ranks, spanned = len(devices), levels(cluster, devices)
    if not spanned:
        return LinkSpeed()
    seconds = sum((level.width - 1) / level.width / (level.below * level.link.bandwidth) for level in spanned)
    latency = sum(level.link.latency for level in spanned)
    return LinkSpeed(latency, (ranks - 1) / ranks / seconds) if seconds else LinkSpeed(latency)


def exchange_link(cluster: Cluster, devices: Sequence[int]) -> LinkSpeed:
    """One link over which an all-to-all takes as long as on the links of all levels at the same time."""
    ranks, spanned = len(devices), levels(cluster, devices)
    if not spanned:
        return LinkSpeed()
    others = [level.below * (level.width - 1) / (ranks - 1) for level in spanned]
    seconds = max(share / level.link.bandwidth for share, level in zip(others, spanned, strict=True))
    latency = max(level.link.latency for level in spanned)
    return LinkSpeed(latency, 1 / seconds) if seconds else LinkSpeed(latency)


def _groups(cluster: Cluster, device: int) -> list[object]:
    """The groups that a device lies in, from the inside out; a node in no group of a tier is a group of its own."""
    node = cluster.node_of[device]
    groups: list[object] = [("node", node)]
    for tier in cluster.tiers:
        group = tier.group_of[node]
        groups.append(("group", tier.name, group) if group >= 0 else groups[-1])
    return [*groups, "all"]
