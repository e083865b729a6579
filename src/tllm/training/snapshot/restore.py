"""`SnapshotRestore`: restores the last step that all ranks' memory together holds complete, and sends each box to the
rank that needs it.

The plan under which the snapshots were made does not matter: as with saves, names and boxes say all. What each replica
had of its own is dealt out anew where there are more or fewer replicas (`training.state.replica_local`).
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
from tllm.core.errors import decoded
from tllm.training.checkpoint.manifest import LIMIT
from tllm.training.checkpoint.shard_assignment import HeldBox, shapes_of
from tllm.training.checkpoint.shard_writer import held_boxes
from tllm.training.snapshot.memory_snapshot import LiveState, SnapshotLabel, StepSnapshot
from tllm.training.state.replica_local import read_replica_local
from tllm.training.state.tensor_blocks import TensorBlock
from tllm.training.state.train_state import TrainState
from tllm.weights.boxes import Box, Shape, chunks, overlap, regions, widths, within
from tllm.weights.load import Progress, part

CHUNK_BYTES = 8 * 1024 * 1024
"""Sent at once: what a rank takes beside its tensors."""


class OfferedSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot that a rank has: of which step, whether it says where the data goes on, and its boxes.

    `is_copied`: it stays when the rank goes on, as what it computes with does not.
    """

    label: SnapshotLabel
    knows_position: bool
    boxes: list[HeldBox]
    is_copied: bool = True


class RankOffer(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has and the boxes it needs; the `layout_bound` ones it takes only if all ranks' are there."""

    snapshots: list[OfferedSnapshot]
    needed: list[HeldBox]
    layout_bound: list[HeldBox] = []


_OFFERS = msgspec.msgpack.Decoder(RankOffer)


class BoxPlace(NamedTuple):
    """Where a box is: the rank, the number of its snapshot and of a block in it, and the box."""

    rank: int
    snapshot: int
    block: int
    box: Box


class BoxTransfer(NamedTuple):
    """A box from a block of one of the source's snapshots to a block of the target; boxes count globally."""

    source: int
    target: int
    snapshot: int
    source_block: int
    target_block: int
    box: Box


class SnapshotRestore:
    """One attempt to go on from memory: what all ranks offer, and the last complete step. All ranks make it together.

    `state` is what this rank needs; a node without a rank gives an empty one and only sends. `label` is None where no
    step is complete.
    """

    def __init__(self, group: Group, snapshots: Sequence[StepSnapshot], state: TrainState) -> None:
        self._group, self._snapshots, self._blocks = group, snapshots, state.blocks
        self.offers = _exchange_offers(group, snapshots, state)
        self.label = last_complete(self.offers)

    def run(self, progress: Progress | None = None) -> bytes:
        """Fill the blocks of every rank from the step that was found; where in the data the run goes on."""
        assert self.label is not None, "there is a step to go back to"
        transfers = transfers_of(self.offers, self.label)
        run_transfers(self._group, transfers, self._snapshots, self._blocks, progress)
        for number in range(1, rounds_of(self.offers, self.label)):
            self._add(transfers_of(self.offers, self.label, number))
        return self._told_position(self.label)

    def _told_position(self, label: SnapshotLabel) -> bytes:
        """Where the data goes on after a step, which the first rank that knows tells all others: it may be long."""
        root = knowing_position(self.offers, label)
        assert root is not None, "else the step is not complete"
        known = [made.data_position for made in self._snapshots if made.label == label and made.data_position]
        return self._group.broadcast_bytes(known[0] if root == self._group.rank else None, root, LIMIT)

    def _add(self, transfers: Sequence[BoxTransfer]) -> None:
        """Add to blocks that are filled what further replicas of before had of the same (residuals)."""
        targets = {transfer.target_block for transfer in transfers if transfer.target == self._group.rank}
        more = [
            block._replace(tensor=torch.zeros_like(block.tensor)) if number in targets else block
            for number, block in enumerate(self._blocks)
        ]
        run_transfers(self._group, transfers, self._snapshots, more)
        for number in targets:
            self._blocks[number].tensor.add_(more[number].tensor)


def _exchange_offers(group: Group, snapshots: Sequence[StepSnapshot], state: TrainState) -> list[RankOffer]:
    """What each rank has and needs, on every rank. All ranks call."""
    offered = [
        OfferedSnapshot(made.label, bool(made.data_position), held_boxes(made.blocks), not isinstance(made, LiveState))
        for made in snapshots
    ]
    needed = held_boxes([*state.updated, *state.reduction])
    mine = msgspec.msgpack.encode(RankOffer(offered, needed, held_boxes(state.layout_bound)))
    return [decoded(one, _OFFERS, "a rank's offer of copies is none") for one in group.all_gather_bytes(mine, LIMIT)]


def last_complete(offers: Sequence[RankOffer]) -> SnapshotLabel | None:
    """The last step of which all ranks together have every element that is needed, and where the data goes on."""
    labels = sorted({made.label for offer in offers for made in offer.snapshots}, reverse=True)
    return next((label for label in labels if _is_whole(offers, label)), None)


def knowing_position(offers: Sequence[RankOffer], label: SnapshotLabel) -> int | None:
    """The first rank that knows where the data goes on after a step; None if none does."""
    knowing = (
        rank
        for rank, offer in enumerate(offers)
        if any(made.label == label and made.knows_position for made in offer.snapshots)
    )
    return next(knowing, None)


def has_copy(offer: RankOffer, label: SnapshotLabel, boxes: Sequence[HeldBox]) -> bool:
    """Whether a rank has a copy of these very boxes that stays; none is needed of nothing."""
    return not boxes or any(
        made.is_copied and made.label == label and made.boxes == list(boxes) for made in offer.snapshots
    )


def rounds_of(offers: Sequence[RankOffer], label: SnapshotLabel) -> int:
    """How many rounds of transfers it takes until each block has all the parts that it is the sum of."""
    replicas = _replicas_in(_spots(offers, label))
    return max((len(_sources(held.name, replicas)) for offer in offers for held in offer.needed), default=1)


def transfers_of(offers: Sequence[RankOffer], label: SnapshotLabel, round_number: int = 0) -> list[BoxTransfer]:
    """Where every rank gets its blocks from: from itself where it can, else from the rank that has sent least so far.

    In each round after the first some blocks are given what is to be added to them. Layout-bound blocks come last.
    """
    found = _spots(offers, label)
    replicas = _replicas_in(found)
    with_bound = round_number == 0 and _holds_layout_bound(offers, found)
    # Of a rank's own it takes what it has first: what it computes with, where it may be in the same memory.
    own = {(name, spot.rank, spot.box): spot for name, spots in found.items() for spot in reversed(spots)}
    sent = [0] * len(offers)
    transfers: list[BoxTransfer] = []
    for target, offer in enumerate(offers):
        for target_block, block in enumerate([*offer.needed, *(offer.layout_bound if with_bound else [])]):
            for source in _sources(block.name, replicas)[round_number : round_number + 1]:
                if (kept := own.get((source, target, block.box))) is not None:  # all of it, as of nearly all ranks
                    transfers.append(BoxTransfer(target, target, kept.snapshot, kept.block, target_block, block.box))
                    continue
                near = [(spot, met) for spot in found[source] if (met := overlap(spot.box, block.box)) is not None]
                for cell, holders in regions(widths(block.box), [within(met, block.box) for _, met in near]):
                    spots = [near[i][0] for i in holders]
                    spot = min(spots, key=lambda spot: (spot.rank != target, sent[spot.rank], spot))
                    box = tuple((a + first, b + first) for (a, b), (first, _) in zip(cell, block.box, strict=True))
                    transfers.append(BoxTransfer(spot.rank, target, spot.snapshot, spot.block, target_block, box))
                    if spot.rank != target:
                        sent[spot.rank] += math.prod(widths(box)) * block.itemsize
    return transfers


def run_transfers(
    group: Group,
    transfers: Sequence[BoxTransfer],
    snapshots: Sequence[StepSnapshot],
    blocks: Sequence[TensorBlock],
    progress: Progress | None = None,
) -> None:
    """Fill this rank's blocks, and send what others need. All ranks call with the same transfers.

    What is there already, as a block is in the memory that its values come from, is left as it is.
    """
    mine = [transfer for transfer in transfers if transfer.target == group.rank]
    sends, receives = defaultdict[int, list[BoxTransfer]](list), defaultdict[int, list[BoxTransfer]](list)
    for transfer in transfers:
        if transfer.source == group.rank:
            sends[transfer.target].append(transfer)
    for transfer in mine:
        receives[transfer.source].append(transfer)
    total = sum(math.prod(widths(transfer.box)) * blocks[transfer.target_block].tensor.itemsize for transfer in mine)
    done = 0

    def filled(block: Tensor) -> None:
        nonlocal done
        done += block.nbytes
        if progress is not None:
            progress(done, total)

    with torch.no_grad():
        for distance in range(group.size):  # in each round every rank sends to one and receives from one
            to, source = (group.rank + distance) % group.size, (group.rank - distance) % group.size
            out = [one for transfer in sends[to] for one in _from(transfer, snapshots)]
            into = [one for transfer in receives[source] for one in _into(transfer, blocks)]
            if distance == 0:
                for target, values in zip(into, out, strict=True):
                    if target.data_ptr() != values.data_ptr():
                        target.copy_(values)
                    filled(target)
            else:
                _swap(group, to, out, source, into, filled)


def _swap(
    group: Group,
    to: int,
    out: Sequence[Tensor],
    source: int,
    into: Sequence[Tensor],
    filled: Callable[[Tensor], None],
) -> None:
    """Send one list of chunks and receive another where they belong, side by side."""
    for number in range(max(len(out), len(into))):
        sends = {to: out[number].contiguous()} if number < len(out) else {}
        recvs = {source: into[number]} if number < len(into) else {}
        group.exchange(sends, recvs)
        for block in recvs.values():
            filled(block)


def _from(transfer: BoxTransfer, snapshots: Sequence[StepSnapshot]) -> Iterator[Tensor]:
    return _chunks(transfer.box, snapshots[transfer.snapshot].blocks[transfer.source_block])


def _into(transfer: BoxTransfer, blocks: Sequence[TensorBlock]) -> Iterator[Tensor]:
    return _chunks(transfer.box, blocks[transfer.target_block])


def _chunks(box: Box, block: TensorBlock) -> Iterator[Tensor]:
    """A box of a block in views of at most CHUNK_BYTES, the same ones at either end."""
    for one in chunks(box, CHUNK_BYTES // block.tensor.itemsize):
        yield part(block.tensor, within(one, block.box))


def _spots(offers: Sequence[RankOffer], label: SnapshotLabel) -> dict[str, list[BoxPlace]]:
    """Where boxes of each tensor are."""
    found: dict[str, list[BoxPlace]] = defaultdict(list)
    for rank, offer in enumerate(offers):
        for number, made in enumerate(offer.snapshots):
            for block, held in enumerate(made.boxes if made.label == label else []):
                found[held.name].append(BoxPlace(rank, number, block, held.box))
    return found


def _is_whole(offers: Sequence[RankOffer], label: SnapshotLabel) -> bool:
    if knowing_position(offers, label) is None:
        return False
    found = _spots(offers, label)
    replicas = _replicas_in(found)
    shapes = shapes_of([offer.needed for offer in offers])
    return all(_holds(found, source, shape) for name, shape in shapes.items() for source in _sources(name, replicas))


def _holds_layout_bound(offers: Sequence[RankOffer], found: Mapping[str, list[BoxPlace]]) -> bool:
    """Whether all layout-bound state is there."""
    shapes = shapes_of([offer.layout_bound for offer in offers])
    return all(_holds(found, name, shape) for name, shape in shapes.items())


def _holds(found: Mapping[str, list[BoxPlace]], name: str, shape: Shape) -> bool:
    return all(holders for _, holders in regions(shape, list({spot.box for spot in found[name]})))


def _replicas_in(found: Mapping[str, list[BoxPlace]]) -> dict[tuple[str, str, str], int]:
    """How many replicas there were when the snapshots were made, by the kind of a replica's own state."""
    own = (read_replica_local(name) for name in found)
    return {one.kind: one.replicas for one in own if one is not None}


def _sources(name: str, replicas: Mapping[tuple[str, str, str], int]) -> list[str]:
    """The names in snapshots of what a block is the sum of; its own name where no snapshot has any of the kind."""
    own = read_replica_local(name)
    if own is None or own.kind not in replicas:
        return [name]
    return [str(one) for one in own.sources(replicas[own.kind])]
