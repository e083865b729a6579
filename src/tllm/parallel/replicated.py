"""Elements that several ranks hold: sums their partial gradients, and counts each element once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor, nn

from tllm.comm.collectives.group import ROOM_BYTES, Group
from tllm.core.errors import decoded
from tllm.parallel.shard import Gradient, Ranges, ShardPiece, shard_of

Place = tuple[slice, ...]

MAX_ELEMENTS = ROOM_BYTES // 4
"""Float32 elements that are summed at once, which bounds the receive buffer however large a table is."""

SMALL_CELL = MAX_ELEMENTS // 32
"""Elements of a cell up to which it is copied into one message together with others."""


class ReplicatedBlock(msgspec.Struct, frozen=True, order=True):
    """Elements [start, stop) of each dim of a checkpoint's tensor."""

    name: str
    box: Ranges

    @property
    def elements(self) -> int:
        return math.prod(stop - start for start, stop in self.box)


class Claim(msgspec.Struct, frozen=True):
    """What a rank tells the others of one of its pieces that they may hold too."""

    block: ReplicatedBlock
    gradient: Gradient


_CLAIMS = msgspec.msgpack.Decoder(list[Claim])


@dataclass(frozen=True)
class Cell:
    """A block whose elements all have the same `holders` (ranks, ascending).

    On this rank it is the part `place` of the parameter with the number `parameter`.
    """

    block: ReplicatedBlock
    gradient: Gradient
    parameter: int
    place: Place
    holders: tuple[int, ...]


class ReplicatedParameters:
    """Which elements of the checkpoint several ranks of `group` hold, worked out once from the parameters' shards.

    The group is any that holds the elements: the ranks of a stage, or those of all stages where the first and the last
    both hold a tied table. Gradients are given in the order of the parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group) -> None:
        self.group = group
        self.parameters = parameters
        mine = [[_claim(piece, parameter) for piece in _shared_pieces(parameter)] for parameter in parameters]
        claims = _exchange_claims([claim for claims in mine for claim in claims], group)
        self.cells = sorted(self._cells(mine, claims), key=lambda cell: cell.block)
        partial = [cell for cell in self.cells if cell.gradient == "partial" and len(cell.holders) > 1]
        small = [cell for cell in partial if cell.block.elements <= SMALL_CELL]
        # In one order on all ranks, so that no two wait for each other.
        self._together = [[cell] for cell in partial if cell.block.elements > SMALL_CELL] + ([small] if small else [])

    def sum_partial(self, gradients: Sequence[Tensor]) -> None:
        """Replace, in place, what holders computed in part by the sum over them, in rank order: alike to the bit."""
        for cells in self._together:
            self._sum(cells, gradients)

    def counted_elsewhere(self) -> list[list[Place]]:
        """For each parameter the places that a lower rank of the group holds too: what a norm over the mesh skips."""
        places: list[list[Place]] = [[] for _ in self.parameters]
        for cell in self.cells:
            if cell.holders[0] != self.group.rank:
                places[cell.parameter].append(cell.place)
        return places

    def _sum(self, cells: list[Cell], gradients: Sequence[Tensor]) -> None:
        """Sum these cells over their holders, by one message to and from each of the other holders."""
        mine = [gradients[cell.parameter][cell.place] for cell in cells]
        peers = sorted({peer for cell in cells for peer in cell.holders} - {self.group.rank})
        of = {peer: [x for x, cell in zip(mine, cells, strict=True) if peer in cell.holders] for peer in peers}
        sends = {peer: _run(some) for peer, some in of.items()}
        recvs = {peer: torch.empty_like(x) for peer, x in sends.items()}
        self.group.exchange(sends, recvs)
        read = {peer: _reader(x, of[peer]) for peer, x in recvs.items()}
        for x, cell in zip(mine, cells, strict=True):
            parts = [x if peer == self.group.rank else next(read[peer]) for peer in cell.holders]
            for part in parts[1:]:
                parts[0].add_(part)
            if parts[0] is not x:
                x.copy_(parts[0])

    def _cells(self, mine: list[list[Claim]], claims: list[list[Claim]]) -> Iterator[Cell]:
        held: dict[str, list[tuple[int, Claim]]] = {}
        for rank, of_rank in enumerate(claims):
            for claim in of_rank:
                held.setdefault(claim.block.name, []).append((rank, claim))
        for index, parameter in enumerate(self.parameters):
            for piece, claim in zip(_shared_pieces(parameter), mine[index], strict=True):
                others = held[claim.block.name]
                boxes = _cut_by(claim.block.box, [other.block.box for _, other in others])
                for box in (part for whole in boxes for part in _in_rooms(whole)):
                    holders = sorted(rank for rank, other in others if _covers(other.block.box, box))
                    kinds = {other.gradient for _, other in others if _covers(other.block.box, box)}
                    assert len(kinds) == 1, f"holders of {claim.block.name}{box} differ on what its gradient is"
                    assert len(set(holders)) == len(holders), f"a rank holds {claim.block.name}{box} twice"
                    place = _place(piece, claim.block.box, box)
                    yield Cell(ReplicatedBlock(claim.block.name, box), claim.gradient, index, place, tuple(holders))


def _shared_pieces(parameter: nn.Parameter) -> tuple[ShardPiece, ...]:
    shard = shard_of(parameter)
    return shard.pieces if shard.replicated else ()


def _claim(piece: ShardPiece, parameter: nn.Parameter) -> Claim:
    box = piece.source or tuple((0, width) for width in parameter.shape)
    return Claim(ReplicatedBlock(piece.name, box), shard_of(parameter).gradient)


def _exchange_claims(mine: list[Claim], group: Group) -> list[list[Claim]]:
    """Every rank's claims, by rank."""
    told = group.all_gather_bytes(msgspec.msgpack.encode(mine))
    return [decoded(claims, _CLAIMS, f"{len(claims)} bytes do not say what a rank holds") for claims in told]


def _cut_by(box: Ranges, others: list[Ranges]) -> Iterator[Ranges]:
    """The box cut into parts, each wholly inside or wholly outside every other box."""
    sides = []
    for dim, (start, stop) in enumerate(box):
        seams = {start, stop} | {at for other in others for at in other[dim] if start < at < stop}
        sides.append(list(itertools.pairwise(sorted(seams))))
    return itertools.product(*sides)


def _in_rooms(box: Ranges) -> Iterator[Ranges]:
    """The box cut into runs of its rows, each of at most `MAX_ELEMENTS` elements, or one row."""
    (start, stop), *rest = box
    rows = max(1, MAX_ELEMENTS // math.prod(b - a for a, b in rest))
    for first in range(start, stop, rows):
        yield ((first, min(first + rows, stop)), *rest)


def _covers(outer: Ranges, inner: Ranges) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def _place(piece: ShardPiece, source: Ranges, box: Ranges) -> Place:
    """Where a part of a piece lies in its parameter."""
    target = piece.target or tuple((0, stop - start) for start, stop in source)
    assert len(target) == len(box), "a stack of tensors is not held by several ranks"
    return tuple(
        slice(at + start - first, at + stop - first)
        for (at, _), (first, _), (start, stop) in zip(target, source, box, strict=True)
    )


def _run(some: Sequence[Tensor]) -> Tensor:
    """What goes to a peer, cell after cell; a single one that is contiguous is not copied."""
    return torch.cat([x.reshape(-1) for x in some]) if len(some) > 1 else some[0].reshape(-1)


def _reader(flat: Tensor, alike: Sequence[Tensor]) -> Iterator[Tensor]:
    """What a peer sent, cell after cell."""
    at = 0
    for x in alike:
        yield flat[at : at + x.numel()].view(x.shape)
        at += x.numel()
