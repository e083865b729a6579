"""What copies in the memory of all ranks give back: the last step that is whole, each box to who needs it.

Nothing is asked of the plan under which the copies were made: as with saves, names and boxes say all. What each replica
had of its own is dealt out anew where there are more or fewer (`train.state.replica_local`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.core.errors import UNREADABLE, FrameError
from tllm.train.checkpoint.shard_assignment import HeldBox, shapes_of
from tllm.train.snapshot.memory_snapshot import SnapshotLabel, StepSnapshot
from tllm.train.state.replica_local import read_replica_local
from tllm.train.state.tensor_blocks import TensorBlock
from tllm.weights.boxes import Box, Shape, chunks, overlap, regions, widths, within
from tllm.weights.dtypes import NAMES
from tllm.weights.load import Progress, part

CHUNK_BYTES = 8 * 1024 * 1024
"""Sent at once: what a rank takes beside its tensors."""


class SnapshotOffers(msgspec.Struct, frozen=True, array_like=True):
    """A copy that a rank has: what of, where the data goes on, if it knows, and the boxes."""

    label: SnapshotLabel
    place: bytes
    boxes: list[HeldBox]


class SnapshotOffer(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has, the boxes that it needs, and those that it takes if all of everybody's are there."""

    copies: list[SnapshotOffers]
    wanted: list[HeldBox]
    bound: list[HeldBox] = []


class BoxPlace(NamedTuple):
    """Where a box is: the rank, the number of its copy and of a block in it, and the box."""

    rank: int
    copy: int
    here: int
    box: Box


class BoxTransfer(NamedTuple):
    """A box from block `here` of one of the source's copies to the target's block `there`; boxes count globally."""

    source: int
    target: int
    copy: int
    here: int
    there: int
    box: Box


def held_boxes(blocks: Sequence[TensorBlock]) -> list[HeldBox]:
    """The blocks without their values."""
    return [HeldBox(b.name, b.box, NAMES[b.tensor.dtype], b.tensor.dtype.itemsize) for b in blocks]


def offers_of(
    group: Group, copies: Sequence[StepSnapshot], blocks: Sequence[TensorBlock], bound: Sequence[TensorBlock] = ()
) -> list[SnapshotOffer]:
    """What each rank has and needs, on every rank. All ranks call."""
    offered = [SnapshotOffers(copy.label, copy.place, held_boxes(copy.blocks)) for copy in copies]
    mine = msgspec.msgpack.encode(SnapshotOffer(offered, held_boxes(blocks), held_boxes(bound)))
    try:
        return [msgspec.msgpack.decode(one, type=SnapshotOffer) for one in group.all_gather_bytes(mine)]
    except UNREADABLE as error:
        raise FrameError(f"a rank's offer of copies is none: {error}") from error


def last_whole(offers: Sequence[SnapshotOffer]) -> SnapshotLabel | None:
    """The last step of which all ranks together have every element that is needed, and where the data goes on."""
    labels = sorted({copy.label for offer in offers for copy in offer.copies}, reverse=True)
    return next((label for label in labels if _is_whole(offers, label)), None)


def place_in(offers: Sequence[SnapshotOffer], label: SnapshotLabel) -> bytes:
    """Where the data goes on after a step; b"" if no rank knows."""
    return next((copy.place for offer in offers for copy in offer.copies if copy.label == label and copy.place), b"")


def turns_of(offers: Sequence[SnapshotOffer], label: SnapshotLabel) -> int:
    """How often ranks must be given something until each has all that its blocks are the sum of."""
    before = _replicas_in(_spots(offers, label))
    return max((len(_sources(one.name, before)) for offer in offers for one in offer.wanted), default=1)


def ways_of(offers: Sequence[SnapshotOffer], label: SnapshotLabel, turn: int = 0) -> list[BoxTransfer]:
    """How every rank comes by its blocks: from itself where it can, else from who has sent least so far.

    In each `turn` after the first some blocks are given what is to be added to them. Those that are bound come last.
    """
    found = _spots(offers, label)
    before = _replicas_in(found)
    bound = turn == 0 and _holds_bound(offers, found)
    sent = [0] * len(offers)
    ways: list[BoxTransfer] = []
    for target, offer in enumerate(offers):
        for there, block in enumerate([*offer.wanted, *(offer.bound if bound else [])]):
            for source in _sources(block.name, before)[turn : turn + 1]:
                near = [(spot, met) for spot in found[source] if (met := overlap(spot.box, block.box)) is not None]
                for cell, holders in regions(widths(block.box), [within(met, block.box) for _, met in near]):
                    spots = [near[i][0] for i in holders]
                    spot = min(spots, key=lambda spot: (spot.rank != target, sent[spot.rank], spot))
                    box = tuple((a + first, b + first) for (a, b), (first, _) in zip(cell, block.box, strict=True))
                    ways.append(BoxTransfer(spot.rank, target, spot.copy, spot.here, there, box))
                    if spot.rank != target:
                        sent[spot.rank] += math.prod(widths(box)) * block.itemsize
    return ways


def carry(
    group: Group,
    ways: Sequence[BoxTransfer],
    copies: Sequence[StepSnapshot],
    blocks: Sequence[TensorBlock],
    progress: Progress | None = None,
) -> None:
    """Fill this rank's blocks, and send what others need. All ranks call with the same ways."""
    mine = [way for way in ways if way.target == group.rank]
    total = sum(math.prod(widths(way.box)) * blocks[way.there].tensor.itemsize for way in mine)
    done = 0

    def came(into: Tensor, values: Tensor) -> None:
        nonlocal done
        into.copy_(values)
        done += values.nbytes
        if progress is not None:
            progress(done, total)

    with torch.no_grad():
        for distance in range(group.size):  # in each round every rank sends to one and receives from one
            to, source = (group.rank + distance) % group.size, (group.rank - distance) % group.size
            out = [one for way in ways if (way.source, way.target) == (group.rank, to) for one in _from(way, copies)]
            into = [one for way in mine if way.source == source for one in _into(way, blocks)]
            if distance == 0:
                for target, values in zip(into, out, strict=True):
                    came(target, values)
            else:
                _swap(group, to, out, source, into, came)


def _swap(
    group: Group,
    to: int,
    out: Sequence[Tensor],
    source: int,
    into: Sequence[Tensor],
    came: Callable[[Tensor, Tensor], None],
) -> None:
    """Send one list of chunks and receive another, side by side."""
    for number in range(max(len(out), len(into))):
        sends = {to: out[number].contiguous()} if number < len(out) else {}
        recvs = {}
        if number < len(into):
            recvs = {source: torch.empty(into[number].shape, dtype=into[number].dtype)}
        group.exchange(sends, recvs)
        for values in recvs.values():
            came(into[number], values)


def _from(way: BoxTransfer, copies: Sequence[StepSnapshot]) -> Iterator[Tensor]:
    return _chunks(way.box, copies[way.copy].blocks[way.here])


def _into(way: BoxTransfer, blocks: Sequence[TensorBlock]) -> Iterator[Tensor]:
    return _chunks(way.box, blocks[way.there])


def _chunks(box: Box, block: TensorBlock) -> Iterator[Tensor]:
    """A box of a block in views of at most CHUNK_BYTES, the same ones at either end."""
    for one in chunks(box, CHUNK_BYTES // block.tensor.itemsize):
        yield part(block.tensor, within(one, block.box))


def _spots(offers: Sequence[SnapshotOffer], label: SnapshotLabel) -> dict[str, list[BoxPlace]]:
    """Where boxes of each tensor are."""
    found: dict[str, list[BoxPlace]] = defaultdict(list)
    for rank, offer in enumerate(offers):
        for number, copy in enumerate(offer.copies):
            for here, one in enumerate(copy.boxes if copy.label == label else []):
                found[one.name].append(BoxPlace(rank, number, here, one.box))
    return found


def _is_whole(offers: Sequence[SnapshotOffer], label: SnapshotLabel) -> bool:
    if not place_in(offers, label):
        return False
    found = _spots(offers, label)
    before = _replicas_in(found)
    shapes = shapes_of([offer.wanted for offer in offers])
    return all(_holds(found, source, shape) for name, shape in shapes.items() for source in _sources(name, before))


def _holds_bound(offers: Sequence[SnapshotOffer], found: Mapping[str, list[BoxPlace]]) -> bool:
    """Whether all is there that hangs on how replicas are cut."""
    shapes = shapes_of([offer.bound for offer in offers])
    return all(_holds(found, name, shape) for name, shape in shapes.items())


def _holds(found: Mapping[str, list[BoxPlace]], name: str, shape: Shape) -> bool:
    return all(holders for _, holders in regions(shape, [spot.box for spot in found[name]]))


def _replicas_in(found: Mapping[str, list[BoxPlace]]) -> dict[tuple[str, str, str], int]:
    """How many replicas had a state of their own, by its kind."""
    own = (read_replica_local(name) for name in found)
    return {one.kind: one.replicas for one in own if one is not None}


def _sources(name: str, before: Mapping[tuple[str, str, str], int]) -> list[str]:
    """The names in copies of what a block is the sum of; its own where no copy holds anything of the kind."""
    own = read_replica_local(name)
    if own is None or own.kind not in before:
        return [name]
    return [str(one) for one in own.sources(before[own.kind])]
