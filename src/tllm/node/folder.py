"""The model folder as the cluster shares it: its files, whether another folder is the same, bytes for others."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tllm.cluster.messages import READ_BYTES, Bytes, FileFacts, ReadBytes
from tllm.ground.errors import WeightsError
from tllm.weights.source import LocalFiles

SUFFIXES = (".safetensors", ".safetensors.index.json", "tllm.manifest.json")
SAMPLE_BYTES = 16 * 1024
SAMPLES = 16


class ModelFolder:
    """The weight files of one folder; only these are ever read for others."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.resolve()
        self._source = LocalFiles(self.path)
        names = [name for name in self._source.names() if name.endswith(SUFFIXES)]
        self.files = tuple(FileFacts(name, self._source.size(name), self._digest(name)) for name in names)
        self._sizes = {file.name: file.size for file in self.files}

    def read(self, wanted: ReadBytes) -> Bytes:
        """A part of one of the files, for a node that lacks it."""
        if wanted.file not in self._sizes:
            raise WeightsError(f"{wanted.file[:80]!r} is not a weight file of this model")
        size = self._sizes[wanted.file]
        if not 0 <= wanted.start <= wanted.stop <= size:
            raise WeightsError(f"bytes [{wanted.start}, {wanted.stop}) were asked for of {wanted.file}: it has {size}")
        if wanted.stop - wanted.start > READ_BYTES:
            raise WeightsError(
                f"{wanted.stop - wanted.start} bytes were asked for at once, at most {READ_BYTES} are given"
            )
        data = self._source.read(wanted.file, wanted.start, wanted.stop)
        return Bytes(data, hashlib.sha256(data).digest())

    def _digest(self, name: str) -> bytes:
        """Of samples from head to end: two models, or two states of one, differ nearly everywhere."""
        size = self._source.size(name)
        digest = hashlib.sha256(str(size).encode())
        for i in range(SAMPLES):
            start = max(size - SAMPLE_BYTES, 0) * i // (SAMPLES - 1)
            digest.update(self._source.read(name, start, min(start + SAMPLE_BYTES, size)))
        return digest.digest()


def holds(folder: Path, files: tuple[FileFacts, ...]) -> bool:
    """Whether the same model lies in `folder` here."""
    try:
        return ModelFolder(folder).files == files
    except WeightsError:
        return False


def checked_bytes(wanted: ReadBytes, came: Bytes) -> bytes:
    """The bytes that were asked for, if they are."""
    if len(came.data) != wanted.stop - wanted.start or hashlib.sha256(came.data).digest() != came.digest:
        raise WeightsError(f"bytes [{wanted.start}, {wanted.stop}) of {wanted.file} did not come through whole")
    return came.data
