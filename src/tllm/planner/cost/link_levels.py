"""Collectives over a hierarchy of links: inside nodes, then between nodes of a group, then between groups.

A gather or scatter of S bytes over n ranks moves (n - 1) / n S for each. By levels, the first of w ranks each, the
next of v such groups, it is done inside first, so that all ranks below a slow link share what crosses it:

    flat      (n - 1) / n S / (the slowest B)
    levels    (w - 1) / w S / B_1  +  (v - 1) / v S / (w B_2)  +  ...

A sum is a scatter and a gather. What each rank sends to each other (tokens to experts) gains nothing by levels: each
link carries what goes to ranks beyond it, all beside one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tllm.planner.cluster.device import Cluster, LinkSpeed, worst


class Level(NamedTuple):
    """`width` groups of the level below meet over `link`; `below` ranks are in each of these at the least."""

    width: int
    below: int
    link: LinkSpeed


def levels(cluster: Cluster, devices: Sequence[int]) -> list[Level]:
    """Inside out, those that these devices span. Of unequal groups the widest and the smallest count."""
    keys = [tuple(_groups(cluster, device)) for device in devices]
    found, below = list[Level](), 1
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
            found.append(Level(width, below, worst(cluster.link(a, b) for a, b in pairs)))
        sizes: dict[object, int] = {}
        for key in keys:
            sizes[key[depth]] = sizes.get(key[depth], 0) + 1
        below = min(sizes.values())
    return found


def gather_link(cluster: Cluster, devices: Sequence[int]) -> LinkSpeed:
    """One link over which (n - 1) / n of the bytes take as long as a gather by levels does."""
    ranks, found = len(devices), levels(cluster, devices)
    if not found:
        return LinkSpeed()
    seconds = sum((one.width - 1) / one.width / (one.below * one.link.bandwidth) for one in found)
    latency = sum(one.link.latency for one in found)
    return LinkSpeed(latency, (ranks - 1) / ranks / seconds) if seconds else LinkSpeed(latency)


def exchange_link(cluster: Cluster, devices: Sequence[int]) -> LinkSpeed:
    """One link over which bytes that go to all others alike take as long as on their own links beside one another."""
    ranks, found = len(devices), levels(cluster, devices)
    if not found:
        return LinkSpeed()
    others = [one.below * (one.width - 1) / (ranks - 1) for one in found]
    seconds = max(share / one.link.bandwidth for share, one in zip(others, found, strict=True))
    latency = max(one.link.latency for one in found)
    return LinkSpeed(latency, 1 / seconds) if seconds else LinkSpeed(latency)


def _groups(cluster: Cluster, device: int) -> list[object]:
    """The groups that a device lies in, inside out; a node in none of a tier is a group of its own."""
    node = cluster.node_of[device]
    found: list[object] = [("node", node)]
    for tier in cluster.tiers:
        group = tier.group_of[node]
        found.append(("group", tier.name, group) if group >= 0 else found[-1])
    return [*found, "all"]
