"""Placement of in-memory snapshots: each element on two ranks, so that the run may lose any one rank. No torch.

What several ranks hold is copied by two of them, and nothing is sent. What one rank alone holds it copies, and sends
the copy to its snapshot holder (`spec.process_groups.snapshot_holders`). What ranks of one machine hold together, of
several machines, one of them copies and sends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

from tllm.spec.plan import Wire
from tllm.spec.process_groups import snapshot_holders
from tllm.training.checkpoint.shard_assignment import HeldBox, Place, cells_of
from tllm.weights.boxes import Box, widths

SNAPSHOTS, RESTORE = "mirror", "recall"


class PlacedBox(NamedTuple):
    """A box that a rank copies, of its own block number `block`; `sent`: its snapshot holder keeps it too."""

    block: int
    box: Box
    sent: bool


def snapshot_wires(hosts: Sequence[str]) -> list[Wire]:
    """From each rank to its snapshot holder; none where a rank is alone."""
    holders = snapshot_holders(tuple(hosts)) if len(hosts) > 1 else ()
    return [Wire(rank, holder, SNAPSHOTS) for rank, holder in enumerate(holders)]


def restore_wires(ranks: int, nodes: int) -> list[Wire]:
    """Between all `nodes`, of which the first `ranks` have one of the plan's and the others something in memory."""
    return [Wire(a, b, RESTORE) for a, b in permutations(range(nodes), 2)] if nodes > ranks else []


def place_copies(held: Sequence[Sequence[HeldBox]], hosts: Sequence[str]) -> list[list[PlacedBox]]:
    """What each rank copies of the blocks that it holds, about as many bytes on each."""
    copies: list[list[PlacedBox]] = [[] for _ in held]
    bytes_of, holders = [0] * len(held), snapshot_holders(tuple(hosts))
    for box, places in cells_of(held):
        first, *others = sorted(places, key=lambda place: (bytes_of[place[0]], place))
        second = _second(first, others, hosts)
        size = math.prod(widths(box)) * held[first[0]][first[1]].itemsize
        for rank, number in [first, *second]:
            copies[rank].append(PlacedBox(number, box, sent=not second and len(held) > 1))
            bytes_of[rank] += size
        if not second:
            bytes_of[holders[first[0]]] += size
    return copies


def _second(first: Place, others: Sequence[Place], hosts: Sequence[str]) -> list[Place]:
    """The first of the others that is lost for another reason: on another machine, if there are several of them."""
    if len(set(hosts)) > 1:
        return [place for place in others if hosts[place[0]] != hosts[first[0]]][:1]
    return [place for place in others if place[0] != first[0]][:1]
