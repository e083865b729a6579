"""Assigns the elements of a save to ranks: each is written once, and every rank writes about as much. No torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tllm.core.errors import PlanError
from tllm.weights.boxes import Box, Shape, regions, show, widths


class HeldBox(NamedTuple):
    """One block that a rank holds. `itemsize` is the bytes of an element."""

    name: str
    box: Box
    dtype: str
    itemsize: int


HELD_BOXES = msgspec.msgpack.Decoder(list[HeldBox])

Place = tuple[int, int]
"""A rank, and the number of one of its blocks."""


class Share(NamedTuple):
    """A box that a rank writes, of its own block number `block`."""

    block: int
    box: Box


class ShardAssignment(NamedTuple):
    """What one rank holds and writes of every save, and the whole shape of each tensor."""

    held: list[HeldBox]
    shapes: dict[str, Shape]
    shares: list[Share]


def shapes_of(held: Sequence[Sequence[HeldBox]]) -> dict[str, Shape]:
    """The whole shape of each tensor: as far as the blocks of all ranks reach."""
    shapes: dict[str, Shape] = {}
    for blocks in held:
        for block in blocks:
            reach = tuple(stop for _, stop in block.box)
            known = shapes.get(block.name, reach)
            assert len(known) == len(reach), (
                f"{block.name} has {len(known)} dims on one rank and {len(reach)} on another"
            )
            shapes[block.name] = tuple(max(a, b) for a, b in zip(known, reach, strict=True))
    return shapes


def cells_of(held: Sequence[Sequence[HeldBox]]) -> list[tuple[Box, list[Place]]]:
    """Every tensor as boxes that are each held alike, and who holds them. PlanError where an element has no holder.

    What one block alone has comes first, so that the rest can be dealt to the ranks with least.
    """
    by_name: dict[str, list[Place]] = defaultdict(list)
    for rank, blocks in enumerate(held):
        for number, block in enumerate(blocks):
            by_name[block.name].append((rank, number))
    shapes = shapes_of(held)
    cells: list[tuple[Box, list[Place]]] = []
    for name in sorted(by_name):
        holders = by_name[name]
        dtypes = {held[rank][number].dtype for rank, number in holders}
        assert len(dtypes) == 1, f"{name} is {' and '.join(sorted(dtypes))} on different ranks"
        for box, found in regions(shapes[name], [held[rank][number].box for rank, number in holders]):
            if not found:
                raise PlanError(
                    f"{name}{show(box)} of shape {shapes[name]} is held by no rank, so that a save would lack it",
                    "give a plan that holds each part of the model",
                )
            cells.append((box, [holders[i] for i in found]))
    return sorted(cells, key=lambda cell: len(cell[1]) > 1)


def assign_shards(held: Sequence[Sequence[HeldBox]]) -> list[list[Share]]:
    """What each rank writes. PlanError where an element within the tensors' reach is held by no rank."""
    shares: list[list[Share]] = [[] for _ in held]
    bytes_of = [0] * len(held)
    for box, places in cells_of(held):
        rank, number = min(places, key=lambda place: (bytes_of[place[0]], place))
        shares[rank].append(Share(number, box))
        bytes_of[rank] += math.prod(widths(box)) * held[rank][number].itemsize
    return shares
