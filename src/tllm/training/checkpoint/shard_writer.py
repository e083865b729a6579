"""One rank's part of a save: copied while training waits, then written and hashed while training goes on."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tllm.training.checkpoint.durable_disk import DurableDisk
from tllm.training.checkpoint.manifest import StoredFile
from tllm.training.checkpoint.shard_assignment import HeldBox, Share
from tllm.training.state.optimizer_offload import OffloadedStates, StatePlacement
from tllm.training.state.tensor_blocks import TensorBlock, state_of
from tllm.weights.boxes import Box, Shape, widths, within
from tllm.weights.dtypes import NAMES, memory
from tllm.weights.load import part
from tllm.weights.manifest import CHUNK_MAX, FileHashes
from tllm.weights.safetensors_header import make_header

CHUNK_BYTES = CHUNK_MAX
"""Bytes under one hash, and written at once."""


COPY = "copy"


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank wrote."""

    pieces: tuple[StoredFile, ...]
    files: dict[str, FileHashes]


def held_boxes(blocks: Iterable[TensorBlock]) -> list[HeldBox]:
    """The blocks without their values."""
    return [HeldBox(b.name, b.box, NAMES[b.tensor.dtype], b.tensor.dtype.itemsize) for b in blocks]


@dataclass(frozen=True)
class _Copy:
    """What will be written of a block, in a row."""

    name: str
    box: Box
    dtype: torch.dtype
    row: OffloadedStates

    @property
    def shape(self) -> Shape:
        return widths(self.box)


class ShardSnapshot:
    """Copies of this rank's shares, in a `place` that is taken once and used again by the next save."""

    def __init__(
        self,
        rank: int,
        blocks: Sequence[TensorBlock],
        shares: Sequence[Share],
        shapes: dict[str, Shape],
        place: StatePlacement,
    ) -> None:
        self._shares = shares
        self._copies: list[_Copy] = []
        self._files: dict[str, list[int]] = defaultdict(list)
        self._shapes = shapes
        for number, share in enumerate(shares):
            block = blocks[share.block]
            dtype = block.tensor.dtype
            row = place.keep((COPY,), math.prod(widths(share.box)), dtype, torch.device("cpu"))
            self._copies.append(_Copy(block.name, share.box, dtype, row))
            self._files[f"{state_of(block.name) or 'model'}-{rank:05d}.safetensors"].append(number)

    @property
    def files(self) -> list[str]:
        return sorted(self._files)

    def take(self, blocks: Sequence[TensorBlock]) -> None:
        """Copy the blocks as they are now; they are the blocks it was made with, or others in the same order."""
        for share, copy in zip(self._shares, self._copies, strict=True):
            block = blocks[share.block]
            assert block.name == copy.name
            with copy.row as row:
                row[COPY].view(copy.shape).copy_(part(block.tensor, within(share.box, block.box)))

    def write(self, disk: DurableDisk, folder: Path) -> Written:
        """Write what was copied, and have it on the disk."""
        pieces: list[StoredFile] = []
        hashes: dict[str, FileHashes] = {}
        for file, numbers in self._files.items():
            copies = [self._copies[number] for number in numbers]
            # Largest dtype first, so that each lies at a multiple of its item's size.
            copies.sort(key=lambda copy: (-copy.dtype.itemsize, copy.name, copy.box))
            stored = [StoredFile(copy.name, copy.box, NAMES[copy.dtype], file) for copy in copies]
            header = make_header(
                (piece.key(self._shapes[piece.name]), copy.dtype, copy.shape)
                for piece, copy in zip(stored, copies, strict=True)
            )
            counted = _Hashes()
            size = disk.write(folder / file, counted.over(header, _rows(copies)))
            hashes[file] = FileHashes(size, counted.done())
            pieces += stored
        return Written(tuple(pieces), hashes)


def _rows(copies: Iterable[_Copy]) -> Iterator[Tensor]:
    """Each while it is written."""
    for copy in copies:
        with copy.row as row:
            yield row[COPY]


class _Hashes:
    """The hash of each chunk of what passes through."""

    def __init__(self) -> None:
        self._room = CHUNK_BYTES
        self._open = hashlib.sha256()
        self._closed: list[str] = []

    def over(self, header: bytes, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
        yield from self._through(memoryview(header))
        for tensor in tensors:
            yield from self._through(memory(tensor))

    def done(self) -> list[str]:
        if self._room < CHUNK_BYTES:
            self._close()
        return self._closed

    def _through(self, content: memoryview) -> Iterator[memoryview]:
        while content:
            now, content = content[: self._room], content[self._room :]
            self._open.update(now)
            self._room -= len(now)
            yield now
            if self._room == 0:
                self._close()

    def _close(self) -> None:
        self._closed.append(self._open.hexdigest())
        self._open, self._room = hashlib.sha256(), CHUNK_BYTES
