"""Elements that several ranks hold: their gradients brought together, and each counted once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor, nn

from tllm.comm.group import Group
from tllm.parallel.shard import Gradient, Piece, Ranges, shard_of

Place = tuple[slice, ...]


class Block(msgspec.Struct, frozen=True, order=True):
    """Elements [start, stop) of each dim of a checkpoint's tensor."""

    name: str
    box: Ranges


class Claim(msgspec.Struct, frozen=True):
    """What a rank says of one of its pieces that others may hold too."""

    block: Block
    gradient: Gradient


@dataclass(frozen=True)
class Cell:
    """A block that is held alike: by the same ranks (`holders`, ascending), here by a part of one parameter."""

    block: Block
    gradient: Gradient
    parameter: int
    place: Place
    holders: tuple[int, ...]


class Replicas:
    """What each rank of `group` holds of the same elements of the checkpoint, worked out once from the shards.

    The group is any that holds the elements: the ranks of a stage, or those of all stages where the first and the last
    both hold a tied table. Gradients are given in the order of the parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group) -> None:
        self.group = group
        self.parameters = parameters
        mine = [[_claim(piece, parameter) for piece in _shared_pieces(parameter)] for parameter in parameters]
        claims = _exchange_claims([claim for claims in mine for claim in claims], group)
        self.cells = sorted(self._cells(mine, claims), key=lambda cell: cell.block)
        self._partial = [cell for cell in self.cells if cell.gradient == "partial" and len(cell.holders) > 1]
        self._with = {
            peer: [cell for cell in self._partial if peer in cell.holders]
            for peer in range(group.size)
            if peer != group.rank and any(peer in cell.holders for cell in self._partial)
        }

    def sum_partial(self, gradients: Sequence[Tensor]) -> None:
        """Replace, in place, what holders computed in part by the sum over them, in rank order: alike to the bit."""
        if not self._partial:
            return
        dtype = gradients[self._partial[0].parameter].dtype
        sends = {
            peer: torch.cat([gradients[cell.parameter][cell.place].reshape(-1) for cell in cells]).cpu()
            for peer, cells in self._with.items()
        }
        recvs = {peer: torch.empty(x.shape, dtype=dtype) for peer, x in sends.items()}
        self.group.exchange(sends, recvs)
        read = {peer: _reader(x, self._with[peer], gradients) for peer, x in recvs.items()}
        for cell in self._partial:
            mine = gradients[cell.parameter][cell.place]
            parts = [mine if peer == self.group.rank else next(read[peer]).to(mine.device) for peer in cell.holders]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            mine.copy_(total)

    def counted_elsewhere(self) -> list[list[Place]]:
        """For each parameter the places that a lower rank of the group holds too: what a norm over the mesh skips."""
        places: list[list[Place]] = [[] for _ in self.parameters]
        for cell in self.cells:
            if cell.holders[0] != self.group.rank:
                places[cell.parameter].append(cell.place)
        return places

    def _cells(self, mine: list[list[Claim]], claims: list[list[Claim]]) -> Iterator[Cell]:
        held: dict[str, list[tuple[int, Claim]]] = {}
        for rank, of_rank in enumerate(claims):
            for claim in of_rank:
                held.setdefault(claim.block.name, []).append((rank, claim))
        for index, parameter in enumerate(self.parameters):
            for piece, claim in zip(_shared_pieces(parameter), mine[index], strict=True):
                others = held[claim.block.name]
                for box in _cut_by(claim.block.box, [other.block.box for _, other in others]):
                    holders = sorted(rank for rank, other in others if _covers(other.block.box, box))
                    kinds = {other.gradient for _, other in others if _covers(other.block.box, box)}
                    assert len(kinds) == 1, f"holders of {claim.block.name}{box} differ on what its gradient is"
                    assert len(set(holders)) == len(holders), f"a rank holds {claim.block.name}{box} twice"
                    place = _place(piece, claim.block.box, box)
                    yield Cell(Block(claim.block.name, box), claim.gradient, index, place, tuple(holders))


def sum_partial(parameters: Sequence[nn.Parameter], group: Group) -> None:
    """After a backward pass: complete `.grad` of what ranks of the group computed in part. No gradient is a zero."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    Replicas(parameters, group).sum_partial([p.grad for p in parameters if p.grad is not None])


def _shared_pieces(parameter: nn.Parameter) -> tuple[Piece, ...]:
    shard = shard_of(parameter)
    return shard.pieces if shard.replicated else ()


def _claim(piece: Piece, parameter: nn.Parameter) -> Claim:
    box = piece.source or tuple((0, width) for width in parameter.shape)
    return Claim(Block(piece.name, box), shard_of(parameter).gradient)


def _exchange_claims(mine: list[Claim], group: Group) -> list[list[Claim]]:
    """Every rank's claims, by rank."""
    claims = []
    for rank in range(group.size):
        payload = group.broadcast_bytes(msgspec.msgpack.encode(mine) if rank == group.rank else None, root=rank)
        claims.append(msgspec.msgpack.decode(payload, type=list[Claim]))
    return claims


def _cut_by(box: Ranges, others: list[Ranges]) -> Iterator[Ranges]:
    """The box in parts, each of them wholly inside or wholly outside every other box."""
    sides = []
    for dim, (start, stop) in enumerate(box):
        seams = {start, stop} | {at for other in others for at in other[dim] if start < at < stop}
        sides.append(list(itertools.pairwise(sorted(seams))))
    return itertools.product(*sides)


def _covers(outer: Ranges, inner: Ranges) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def _place(piece: Piece, source: Ranges, box: Ranges) -> Place:
    """Where a part of a piece lies in its parameter."""
    target = piece.target or tuple((0, stop - start) for start, stop in source)
    assert len(target) == len(box), "a stack of tensors is not held by several ranks"
    return tuple(
        slice(at + start - first, at + stop - first)
        for (at, _), (first, _), (start, stop) in zip(target, source, box, strict=True)
    )


def _reader(flat: Tensor, cells: list[Cell], gradients: Sequence[Tensor]) -> Iterator[Tensor]:
    """What a peer sent, a cell after another."""
    at = 0
    for cell in cells:
        shape = gradients[cell.parameter][cell.place].shape
        yield flat[at : at + shape.numel()].view(shape)
        at += shape.numel()
