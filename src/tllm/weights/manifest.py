"""`tllm.manifest.json`: a hash of every chunk of every file, so that a rank that reads a part can still check it.

`{"version": 1, "chunk_bytes": n, "files": {name: {"size": bytes, "sha256": [one for each chunk]}}}`. A changed byte
is found when its chunk is read. It guards against damage, not against someone who can write the manifest as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec

from tllm.core.errors import UNREADABLE, WeightsError
from tllm.weights.byte_source import ByteSource, read_run, read_whole
from tllm.weights.byte_spans import Spans, one_span
from tllm.weights.file_chunks import bounds, chunk_length, read_from_chunks, touched

MANIFEST = "tllm.manifest.json"
CHUNK_MIN, CHUNK_MAX = 16 * 1024, 1024 * 1024
"""Bytes. Small chunks keep a rank's reading near its own bytes; large ones keep the manifest of a large model small."""
MANIFEST_LIMIT = 100_000_000
CHANGED = f"copy the file again; if it was changed on purpose, delete {MANIFEST}"


class FileHashes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size of one file and the SHA-256 of each chunk of it, the last of which may be short."""

    size: int
    sha256: list[str]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every file of a folder should hold."""

    version: int
    chunk_bytes: int
    files: dict[str, FileHashes]

    @classmethod
    def read(cls, source: ByteSource) -> Manifest:
        """The manifest of a folder that has one."""
        try:
            manifest = _MANIFESTS.decode(read_whole(source, MANIFEST, MANIFEST_LIMIT))
        except UNREADABLE as error:
            raise WeightsError(f"{MANIFEST} is not a manifest: {error}", CHANGED) from error
        if manifest.version != 1:
            raise WeightsError(f"{MANIFEST} is of version {manifest.version} and this is read: 1")
        if manifest.chunk_bytes < 1:
            raise WeightsError(f"{MANIFEST} gives chunks of {manifest.chunk_bytes} bytes", CHANGED)
        return manifest


_MANIFESTS = msgspec.json.Decoder(Manifest)


def make_manifest(folder: Path, files: list[str]) -> Manifest:
    """Hash files of a folder."""
    chunk = chunk_length(((folder / file).stat().st_size for file in files), CHUNK_MIN, CHUNK_MAX)
    return Manifest(1, chunk, {file: hashes_of(folder / file, chunk) for file in sorted(files)})


def checked(source: ByteSource) -> ByteSource:
    """The same files, checked as they are read if the folder has a manifest."""
    return CheckedFiles(source, Manifest.read(source)) if MANIFEST in source.names() else source


class CheckedFiles:
    """Another source's files, read in whole chunks that must have the manifest's hashes.

    `bytes_read` is the other source's: it counts the whole chunks. A file that the manifest does not name is refused.
    `name` is the file that the hashes stand in, `hint` what to do where one is not met.
    """

    def __init__(self, source: ByteSource, manifest: Manifest, name: str = MANIFEST, hint: str = CHANGED) -> None:
        self._source = source
        self._manifest = manifest
        self._name = name
        self._hint = hint
        self._latest: tuple[str, int, memoryview] = ("", 0, memoryview(b""))

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def names(self) -> list[str]:
        return self._source.names()

    def size(self, file: str) -> int:
        size, hashes = self._source.size(file), self._manifest.files.get(file)
        if hashes is None:
            raise WeightsError(f"{file} is not in {self._name}", self._hint)
        if size != hashes.size:
            raise WeightsError(f"{file} has {size} bytes and {self._name} says {hashes.size}", self._hint)
        if len(hashes.sha256) != -(-size // self._manifest.chunk_bytes):
            raise WeightsError(
                f"{self._name} has {len(hashes.sha256)} hashes for the {size} bytes of {file}", self._hint
            )
        return size

    def expect(self, wanted: Iterable[tuple[str, Spans]]) -> None:
        """Announce to the other source the whole chunks that will be read for these runs."""
        self._source.expect(
            (file, one_span(*bounds(number, self._manifest.chunk_bytes, self.size(file))))
            for file, spans in wanted
            for number in touched(spans, self._manifest.chunk_bytes)
        )

    def read(self, file: str, start: int, stop: int) -> bytes:
        return read_run(self, file, start, stop)

    def read_spans(self, file: str, spans: Spans, out: memoryview) -> None:
        size = self.size(file)
        if spans.stop > size:
            raise WeightsError(f"{file} has {size} bytes and byte {spans.stop} was asked for")
        read_from_chunks(spans, self._manifest.chunk_bytes, partial(self._chunk, file, size), out)

    def _chunk(self, file: str, size: int, number: int) -> memoryview:
        known, at, content = self._latest
        if (known, at) != (file, number):
            start = number * self._manifest.chunk_bytes
            stop = min(start + self._manifest.chunk_bytes, size)
            content = memoryview(self._source.read(file, start, stop))
            if hashlib.sha256(content).hexdigest() != self._manifest.files[file].sha256[number]:
                raise WeightsError(f"{file}: bytes [{start}, {stop}) are not what {self._name} says", self._hint)
            self._latest = (file, number, content)
        return content


def hashes_of(path: Path, chunk: int) -> FileHashes:
    """Of a file in chunks of so many bytes. OSError as the system raises it."""
    hashes = []
    with path.open("rb") as file:
        while content := file.read(chunk):
            hashes.append(hashlib.sha256(content).hexdigest())
    return FileHashes(path.stat().st_size, hashes)
