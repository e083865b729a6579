"""Weights of few bits, read from the files and packed in memory as the kernels want them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tllm.kernels.library import LANES
from tllm.kernels.packing import X_GROUP
from tllm.parallel.quantized_weight import PackedRows, QuantizedStack, QuantizedWeight, carry, stands_for
from tllm.parallel.shard import ShardPiece, shard_of
from tllm.quantization.blocks import Blocks
from tllm.quantization.packed_layout import PackedTensors, pack, room_for_codes
from tllm.weights.boxes import Box, whole, widths, within
from tllm.weights.byte_source import ByteSource
from tllm.weights.safetensors_index import Index

READ_AT_ONCE = 2**21
"""Weights that are read, decoded and packed at once, or one block of 16 outputs."""


def is_packed(parameter: nn.Parameter, index: Index) -> bool:
    """Whether a parameter's weights have few bits in the files, some of them at least."""
    if parameter.dim() < 2 or shard_of(parameter).plain:
        return False
    stored = [index.stored.get(piece.name) for piece in _pieces(parameter)]
    return any(one is not None and one.scheme is not None for one in stored)


@dataclass
class PackedTask:
    """Reads one piece of a parameter, a box of a weight in the files: into packed tensors, or a plain one of `dtype`.

    `part` is what has been read of it, `codes` the memory for packed codes of all of it; both are on the host until it
    is whole and goes to the `device`.
    """

    name: str
    box: Box
    dtype: torch.dtype
    device: torch.device
    part: PackedRows | Tensor | None = None
    codes: Tensor | None = None

    def boxes(self) -> Iterator[Box]:
        """The box in parts that are read at once, each but the last of whole blocks of outputs."""
        *ahead, (first, last), columns = self.box
        rows = max(LANES, READ_AT_ONCE // (columns[1] - columns[0]) // LANES * LANES)
        for at in range(first, last, rows):
            yield (*ahead, (at, min(at + rows, last)), columns)

    def fill(self, index: Index, source: ByteSource) -> Iterator[int]:
        """Read it. Yields the bytes of each part."""
        for box in self.boxes():
            planes = index.read_planes(source, self.name, box)
            self._put(box, index, planes)
            yield sum(x.nbytes for x in planes.values())
        assert self.part is not None
        self.part, self.codes = self.part.to(self.device), None

    def _put(self, box: Box, index: Index, planes: dict[str, Tensor]) -> None:
        """Decode what was read for a box, and put it where it belongs in the part."""
        stored = index.stored.get(self.name)
        aligned = box if stored is None else stored.aligned(box)
        found = planes[self.name] if stored is None else stored.decode(aligned, planes)
        if isinstance(found, Blocks):
            self._put_packed(*trimmed(found, box, aligned), self._first(box))
        else:
            rows, columns = (slice(*bounds) for bounds in within(box, aligned)[-2:])
            self._put_plain(found.reshape(widths(aligned)[-2:])[rows, columns], self._first(box))

    def _first(self, box: Box) -> int:
        """The output that a box begins with, counted from the piece's first."""
        return box[-2][0] - self.box[-2][0]

    def _put_plain(self, rows: Tensor, first: int) -> None:
        if self.part is None:
            self.part = torch.empty(widths(self.box)[-2:], dtype=self.dtype)
        assert isinstance(self.part, Tensor)
        self.part[first : first + len(rows)] = rows

    def _put_packed(self, blocks: Blocks, lead: int, first: int) -> None:
        rows, columns = blocks.codes.shape
        outputs = widths(self.box)[-2]
        if self.codes is None:
            self.codes = room_for_codes(outputs, columns, blocks.scheme.bits)
        at, stop = first // LANES, -(-(first + rows) // LANES)
        packed = pack(blocks, self.codes[at:stop])
        if self.part is None:
            self.part = PackedRows(_room(packed, self.codes), blocks.scheme, outputs, columns, lead)
        assert isinstance(self.part, PackedRows)
        for name, into in self.part.tensors.named().items():
            if name != "codes":
                into[at:stop] = packed.named()[name]


def trimmed(blocks: Blocks, box: Box, at: Box) -> tuple[Blocks, int]:
    """The matrix of a box out of the one that is `at` an aligned box, and how many columns before the box it begins.

    It begins at a group; where a row has one scale, at a whole 32 columns, so that activations are rounded alike
    wherever a weight is cut.
    """
    blocks = _matrix(blocks)
    (row, last_row), (column, last_column) = box[-2:]
    (first_row, _), (first_column, _) = at[-2:]
    blocks = blocks.narrow(-2, row - first_row, last_row - first_row)
    scheme = blocks.scheme
    unit = math.lcm(scheme.super_group or scheme.group, X_GROUP)
    if blocks.scales.shape[-1] == 1 and not scheme.super_group:
        start = max(first_column, column // X_GROUP * X_GROUP)
        codes = blocks.codes[:, start - first_column : last_column - first_column]
        return replace(blocks, codes=codes), column - start
    assert first_column % unit == 0 or first_column == 0, "an aligned box begins at a group"
    start = column // unit * unit
    return blocks.narrow(-1, start - first_column, last_column - first_column), column - start


def _matrix(blocks: Blocks) -> Blocks:
    """A stack of one matrix as that matrix."""
    if blocks.codes.dim() == 2:
        return blocks
    return Blocks(blocks.scheme, **{name: x.flatten(0, -2) for name, x in blocks.named().items()})


def _room(packed: PackedTensors, codes: Tensor) -> PackedTensors:
    """These codes, and tensors like the others for as many blocks."""
    others = {name: x for name, x in packed.named().items() if name != "codes"}
    room = {name: torch.empty((len(codes), *x.shape[1:]), dtype=x.dtype) for name, x in others.items()}
    return PackedTensors(codes, **room)


def packed_tasks(parameter: nn.Parameter, index: Index) -> list[PackedTask]:
    """What is to be read for a parameter, in the order of its pieces."""
    _, dtype = stands_for(parameter)
    return [PackedTask(piece.name, _source(piece, index), dtype, parameter.device) for piece in _pieces(parameter)]


def assemble(parameter: nn.Parameter, tasks: list[PackedTask]) -> None:
    """Let a parameter carry what its tasks have read: one weight, or one for each expert of a stack."""
    shape, pieces = tuple(stands_for(parameter)[0]), _pieces(parameter)
    columns = shape[-2] if shard_of(parameter).matrices else shape[-1]
    stacks: dict[int, list[tuple[int, PackedRows | Tensor]]] = defaultdict(list)
    for piece, task in zip(pieces, tasks, strict=True):
        *ahead, (row, _), (column, last) = piece.target or whole(shape)
        assert task.part is not None and (column, last) == (0, columns), "a piece has whole rows of its parameter"
        stacks[ahead[0][0] if ahead else 0].append((row, task.part))
    weights = [
        QuantizedWeight([part for _, part in sorted(stacks[number], key=lambda placed: placed[0])], columns)
        for number in sorted(stacks)
    ]
    carry(parameter, QuantizedStack(weights) if len(shape) > 2 else weights[0])


def _pieces(parameter: nn.Parameter) -> tuple[ShardPiece, ...]:
    """What a parameter is made of, as matrices."""
    shard = shard_of(parameter)
    return shard.matrices or shard.pieces


def _source(piece: ShardPiece, index: Index) -> Box:
    return piece.source or whole(index.shape(piece.name))
