"""`checkpoint.json`: what a save holds, the last file written into it. No torch.

`{"sha256": of the rest, "checkpoint": {step, shapes, pieces, hashes of every file by the chunk, facts}}`. A piece is
one box of one tensor in one file; together the pieces of a tensor hold each of its elements once.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from typing import Any

import msgspec

from tllm.core.errors import UNREADABLE, WeightsError
from tllm.weights.boxes import Box, Shape, is_inside, regions, show, whole
from tllm.weights.byte_source import ByteSource, read_whole
from tllm.weights.manifest import Manifest

NAME = "checkpoint.json"
VERSION = 1
LIMIT = 1_000_000_000
"""Bytes that are read at most."""
PLAIN = re.compile(r"\w[\w.-]*")
"""What a file of a save may be called."""

CHANGED = "copy the folder again, or remove it and resume from the save before it"


class StoredFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One box of a tensor, and the file that holds it."""

    name: str
    box: tuple[tuple[int, int], ...]
    dtype: str
    file: str

    def key(self, shape: Shape) -> str:
        """Its name within the file: a tensor that is whole has its own."""
        return self.name if self.box == whole(shape) else f"{self.name}{show(self.box)}"


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A complete save after `step` steps. `facts` are whatever else the run needs to go on, as JSON holds it."""

    version: int
    step: int
    shapes: dict[str, tuple[int, ...]]
    pieces: tuple[StoredFile, ...]
    hashes: Manifest
    facts: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Of all its files, this one left out."""
        return sum(file.size for file in self.hashes.files.values())


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str
    checkpoint: msgspec.Raw


_ENVELOPES, _MANIFESTS = msgspec.json.Decoder(_Envelope), msgspec.json.Decoder(CheckpointManifest)


def encode(saved: CheckpointManifest) -> bytes:
    """The file's bytes."""
    content = msgspec.json.encode(saved)
    return msgspec.json.encode(_Envelope(hashlib.sha256(content).hexdigest(), msgspec.Raw(content)))


def decode(content: bytes) -> CheckpointManifest:
    """What the bytes say, once they are found to be true in themselves; WeightsError if they are not."""
    try:
        envelope = _ENVELOPES.decode(content)
        if hashlib.sha256(envelope.checkpoint).hexdigest() != envelope.sha256:
            raise WeightsError(f"{NAME} does not have the hash that it gives", CHANGED)
        saved = _MANIFESTS.decode(envelope.checkpoint)
    except UNREADABLE as error:
        raise WeightsError(f"{NAME} is not the list of a save: {error}", CHANGED) from error
    if saved.version != VERSION:
        raise WeightsError(f"{NAME} is of version {saved.version} and this is read: {VERSION}")
    _check(saved)
    return saved


def read_saved(source: ByteSource) -> CheckpointManifest:
    """The list of a folder's save. It says nothing of whether the files are there."""
    if NAME not in source.names():
        raise WeightsError(f"there is no {NAME}: this is not a complete save", "resume from another one")
    return decode(read_whole(source, NAME, LIMIT))


def _check(saved: CheckpointManifest) -> None:
    """Every piece lies in a file that is hashed and within its tensor, and each element is held once."""
    for file in saved.hashes.files:  # another rank may have written this: no file leads out of the save's folder
        if PLAIN.fullmatch(file) is None:
            raise WeightsError(f"{NAME} names a file {file[:80]!r}", CHANGED)
    boxes: dict[str, list[Box]] = defaultdict(list)
    for piece in saved.pieces:
        if piece.file not in saved.hashes.files:
            raise WeightsError(f"{NAME} puts {piece.name} into {piece.file}, which it gives no hash of", CHANGED)
        shape = saved.shapes.get(piece.name)
        if shape is None or not is_inside(piece.box, shape):
            box = show(piece.box)
            raise WeightsError(f"{NAME} has {piece.name}{box}, which is not inside the tensor's shape {shape}", CHANGED)
        boxes[piece.name].append(piece.box)
    for name, shape in saved.shapes.items():
        _check_tensor(name, shape, boxes[name])


def _check_tensor(name: str, shape: Shape, boxes: list[Box]) -> None:
    if boxes == [whole(shape)]:
        return
    for box, holders in regions(shape, boxes):
        if len(holders) != 1:
            raise WeightsError(f"{NAME} holds {name}{show(box)} {len(holders)} times", CHANGED)
