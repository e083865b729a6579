"""A folder of model weights as nodes share it: its files, their bytes, and whether two folders hold the same model."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection
from pathlib import Path

from tllm.cluster.weight_messages import READ_BYTES, Bytes, ModelFileFacts, ReadBytes
from tllm.core.errors import WeightsError
from tllm.core.gguf_files import gguf_files, is_gguf
from tllm.node.weights.chunk_contents import contents
from tllm.node.weights.tokenizer_file import TOKENIZER, tokenizer_file
from tllm.weights.byte_source import ByteSource, LocalFiles
from tllm.weights.file_chunks import FileChunk, bounds, chunk_bytes
from tllm.weights.lora.sampled_digest import is_another, sampled_digest

SUFFIXES = (".safetensors", ".safetensors.index.json", "tllm.manifest.json")
SAMPLE_BYTES = 16 * 1024
SAMPLES = 16
HEADS_BYTES = 64 * 1024 * 1024
"""`ReadBytes` asks for the headers of files. So many bytes of them stay in memory, as a node may need them when the
disk is gone."""


class ModelFolder:
    """The weight files of one folder, or a GGUF file, and its tokenizer; nothing else is ever read for other nodes.
    Any thread may call it."""

    def __init__(self, folder: Path) -> None:
        # A GGUF file may be a link to one that is called otherwise.
        self.path = folder.parent.resolve() / folder.name if is_gguf(folder) else folder.resolve()
        self._source: ByteSource = LocalFiles(self.path)
        listed = self._source.names()
        names = [name for name in listed if name.endswith(SUFFIXES)] + gguf_files(listed)
        self._share(tuple(ModelFileFacts(name, self._source.size(name), self._digest(name)) for name in names))

    def _share(self, files: tuple[ModelFileFacts, ...]) -> None:
        """Give these files of `_source`, and no others."""
        self.files = files
        self._sizes = {file.name: file.size for file in self.files}
        self._chunk_bytes = chunk_bytes(self._sizes)
        self._hashes: dict[FileChunk, bytes] = {}
        self._heads, self._heads_room = dict[ReadBytes, Bytes](), HEADS_BYTES
        self._tokenizer = b""
        self._sampled: str | None = None
        self._lock = threading.Lock()

    def read(self, wanted: ReadBytes) -> Bytes:
        """Bytes of one of the files, for a node that lacks it. WeightsError for what is none of the model's."""
        if wanted.file == TOKENIZER:
            with self._lock:
                self._tokenizer = self._tokenizer or tokenizer_file(self.path)
            return hashed(self._tokenizer[wanted.start : wanted.stop])
        if wanted.file not in self._sizes:
            raise WeightsError(f"{wanted.file[:80]!r} is not a weight file of this model")
        check_range(wanted, self._sizes[wanted.file])
        if (known := self._heads.get(wanted)) is not None:
            return known
        with self._lock:
            read = hashed(self._source.read(wanted.file, wanted.start, wanted.stop))
            if self._heads_room >= len(read.data):
                self._heads[wanted] = read
                self._heads_room -= len(read.data)
        return read

    def chunk(self, chunk: FileChunk) -> bytes:
        """One chunk of one of the files."""
        size = self._sizes.get(chunk.file, 0)
        start, stop = bounds(chunk.number, self._chunk_bytes, size)
        if not 0 <= start < stop:
            raise WeightsError(f"{chunk.file[:80]!r} of this model has {size} bytes and no chunk {chunk.number}")
        return self._read_chunk(chunk, start, stop)

    def _read_chunk(self, chunk: FileChunk, start: int, stop: int) -> bytes:
        with self._lock:
            return self._source.read(chunk.file, start, stop)

    def hash_of(self, chunk: FileChunk) -> bytes:
        """The SHA-256 of a chunk, which is read once to compute it."""
        if chunk not in self._hashes:
            self._hashes[chunk] = hashlib.sha256(self.chunk(chunk)).digest()
        return self._hashes[chunk]

    def contents(self, file: str, numbers: Collection[int]) -> str:
        """What some chunks of a file hold, in words; "" where that cannot be read."""
        with self._lock:
            return contents(self._source, file, numbers, self._chunk_bytes)

    def is_another_base(self, trained_beside: str) -> bool:
        """Whether the weights are known not to be those that an adapter was trained beside, by the digest it keeps."""
        with self._lock:
            if trained_beside and self._sampled is None:
                self._sampled = sampled_digest(self._source)
            return is_another(trained_beside, self._sampled or "")

    def _digest(self, name: str) -> bytes:
        """SHA-256 of samples of the whole file: two models, or two states of one, differ nearly everywhere."""
        size = self._source.size(name)
        digest = hashlib.sha256(str(size).encode())
        for i in range(SAMPLES):
            start = max(size - SAMPLE_BYTES, 0) * i // (SAMPLES - 1)
            digest.update(self._source.read(name, start, min(start + SAMPLE_BYTES, size)))
        return digest.digest()


def same_model(folder: Path, files: tuple[ModelFileFacts, ...]) -> ModelFolder | None:
    """The folder, if it holds the model with these files; else None."""
    try:
        local = ModelFolder(folder)
    except WeightsError:
        return None
    return local if local.files == files else None


def check_range(wanted: ReadBytes, size: int) -> None:
    """WeightsError for bytes that a file of this size does not have, or for more than are given at once."""
    if not 0 <= wanted.start <= wanted.stop <= size:
        raise WeightsError(f"bytes [{wanted.start}, {wanted.stop}) were asked for of {wanted.file}: it has {size}")
    if wanted.stop - wanted.start > READ_BYTES:
        raise WeightsError(f"{wanted.stop - wanted.start} bytes were asked for at once, at most {READ_BYTES} are given")


def hashed(data: bytes) -> Bytes:
    """The answer to `ReadBytes`, which `checked_bytes` takes at the other end."""
    return Bytes(data, hashlib.sha256(data).digest())


def checked_bytes(wanted: ReadBytes, came: Bytes) -> bytes:
    """The bytes that came, if they are what was asked for. WeightsError if they are not."""
    if len(came.data) != wanted.stop - wanted.start or hashlib.sha256(came.data).digest() != came.digest:
        raise WeightsError(f"bytes [{wanted.start}, {wanted.stop}) of {wanted.file} did not come through whole")
    return came.data
