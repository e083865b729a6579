"""The weights of a model as numbered chunks of bytes, each known by its SHA-256, so that only changed ones are sent.

Chunks are numbered through the tensors in the order of their names. Tensors are whole, as a checkpoint has them, so the
chunks are the same however a plan cuts the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from torch import Tensor

from tllm.weights.dtypes import NAMES, memory

CHUNK_BYTES = 1 << 18
"""Small enough that one changed number costs little, and so large that its hash is a hundredth of a percent of it."""

HASH_BYTES = 32


class ChunkPlace(NamedTuple):
    """Bytes [start, stop) of a tensor laid out row by row."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class ChunkTable:
    """Where each chunk of some tensors lies. `digest` is of the tensors' names, shapes and types."""

    places: tuple[ChunkPlace, ...]
    digest: bytes

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> ChunkTable:
        """The chunks of whole tensors, which need no values yet."""
        places = [
            ChunkPlace(name, start, min(start + CHUNK_BYTES, tensors[name].nbytes))
            for name in sorted(tensors)
            for start in range(0, tensors[name].nbytes, CHUNK_BYTES)
        ]
        forms = [(name, tuple(tensors[name].shape), NAMES[tensors[name].dtype]) for name in sorted(tensors)]
        return cls(tuple(places), hashlib.sha256(msgspec.msgpack.encode(forms)).digest())

    def hashes(self, tensors: Mapping[str, Tensor]) -> bytes:
        """The SHA-256 of every chunk, one after another. The tensors are contiguous and in this process's memory."""
        return b"".join(chunk_hashes(tensors[name]) for name in dict.fromkeys(place.name for place in self.places))

    def root(self, hashes: bytes) -> bytes:
        """What names all the weights: a hash of all chunks' hashes."""
        return sha256(self.digest + hashes)

    def hash_of(self, hashes: bytes, number: int) -> bytes:
        """That of one chunk."""
        return hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]

    def unlike(self, hashes: bytes, others: bytes) -> list[int]:
        """The numbers of the chunks whose hashes are not the same in both."""
        return [at for at in range(len(self.places)) if self.hash_of(hashes, at) != self.hash_of(others, at)]

    def nbytes(self, numbers: list[int]) -> int:
        """Bytes of these chunks together."""
        return sum(self.places[number].stop - self.places[number].start for number in numbers)


def chunk_hashes(tensor: Tensor) -> bytes:
    """Those of one tensor's chunks."""
    content = memory(tensor)
    return b"".join(sha256(content[start : start + CHUNK_BYTES]) for start in range(0, len(content), CHUNK_BYTES))


def sha256(content: bytes | memoryview) -> bytes:
    """The digest of some bytes."""
    return hashlib.sha256(content).digest()
