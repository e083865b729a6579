"""One rank's part of a save: its shares copied while training waits, then written and hashed while it goes on."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tllm.train.blocks import Block, state_of
from tllm.train.disk import Disk
from tllm.train.saved import Stored
from tllm.train.writers import Share
from tllm.weights.boxes import Shape, widths, within
from tllm.weights.header import make_header
from tllm.weights.load import part
from tllm.weights.manifest import CHUNK_MAX, FileHashes
from tllm.weights.memory import NAMES, memory

CHUNK_BYTES = CHUNK_MAX
"""Bytes under one hash, and written at once."""


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank wrote."""

    pieces: tuple[Stored, ...]
    files: dict[str, FileHashes]


class Snapshot:
    """Copies of this rank's shares. Its memory is taken once and used again by the next save."""

    def __init__(self, rank: int, blocks: Sequence[Block], shares: Sequence[Share], shapes: dict[str, Shape]) -> None:
        self._shares = shares
        self._copies: list[Block] = []
        self._files: dict[str, list[int]] = defaultdict(list)
        self._shapes = shapes
        for number, share in enumerate(shares):
            block = blocks[share.block]
            empty = torch.empty(widths(share.box), dtype=block.tensor.dtype)
            self._copies.append(Block(block.name, share.box, empty))
            self._files[f"{state_of(block.name) or 'model'}-{rank:05d}.safetensors"].append(number)

    @property
    def files(self) -> list[str]:
        return sorted(self._files)

    def take(self, blocks: Sequence[Block]) -> None:
        """Copy the blocks as they are now; they are the blocks it was made with, or others in the same order."""
        for share, copy in zip(self._shares, self._copies, strict=True):
            block = blocks[share.block]
            assert block.name == copy.name
            copy.tensor.copy_(part(block.tensor, within(share.box, block.box)))

    def write(self, disk: Disk, folder: Path) -> Written:
        """Write what was copied, and have it on the disk."""
        pieces: list[Stored] = []
        hashes: dict[str, FileHashes] = {}
        for file, numbers in self._files.items():
            copies = [self._copies[number] for number in numbers]
            # Largest dtype first, so that each lies at a multiple of its item's size.
            copies.sort(key=lambda copy: (-copy.tensor.dtype.itemsize, copy.name, copy.box))
            stored = [Stored(copy.name, copy.box, NAMES[copy.tensor.dtype], file) for copy in copies]
            header = make_header(
                (piece.key(self._shapes[piece.name]), copy.tensor.dtype, tuple(copy.tensor.shape))
                for piece, copy in zip(stored, copies, strict=True)
            )
            counted = _Hashes()
            size = disk.write(folder / file, counted.over(header, [copy.tensor for copy in copies]))
            hashes[file] = FileHashes(size, counted.done())
            pieces += stored
        return Written(tuple(pieces), hashes)


class _Hashes:
    """The hash of each chunk of what passes through."""

    def __init__(self) -> None:
        self._room = CHUNK_BYTES
        self._open = hashlib.sha256()
        self._closed: list[str] = []

    def over(self, header: bytes, tensors: Sequence[Tensor]) -> Iterator[memoryview]:
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
