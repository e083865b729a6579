"""`HubChunks`: chunks of a model on the Hugging Face hub, from this machine's disk if they were here before, else from
the hub. No torch.

Fetched chunks go to the node's `ChunkCache`, each under its own SHA-256. Which hash chunk n of a file has stands in a
table beside them, `hub/ETAG-CHUNKBYTES`: 32 bytes a chunk, zeros for one that never came. A torn or changed entry names
a chunk that is not there, and so is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tllm.core.disk import DiskTrouble
from tllm.core.errors import WeightsError
from tllm.hub.byte_ranges import HubRanges
from tllm.hub.folders import local_file
from tllm.hub.repository import HubFile, Repository, check_repository
from tllm.node.weights.range_claim import claimed
from tllm.weights.chunk_cache import ChunkCache
from tllm.weights.file_chunks import FileChunk, bounds, chunk_bytes, numbers, runs

log = logging.getLogger("tllm.weights")

TABLES = "hub"
DIGEST_BYTES = 32


class FetchedChunk(NamedTuple):
    """`came`: from the hub, and with its SHA-256; else it was here, with a hash that was checked, and `digest` is
    empty."""

    data: bytes
    digest: bytes
    came: bool


class HubChunks:
    """Any thread may call it. `ranges.fetched` counts the bytes that came from the hub.

    WeightsError where the repository, which may be another machine's word, names what could be in no repository.
    """

    def __init__(self, repository: Repository, cache: ChunkCache) -> None:
        check_repository(repository)
        self.repository, self.ranges = repository, HubRanges(repository)
        self.sizes = {file.name: file.size for file in repository.files}
        self.chunk_bytes = chunk_bytes(self.sizes)
        self._files = {file.name: file for file in repository.files}
        self._cache = cache
        self._tables = None if cache.folder is None else cache.folder / TABLES
        self._trouble = DiskTrouble(log, f"{self._tables}, by which the next start finds what was fetched,")

    def size_of(self, chunk: FileChunk) -> int:
        """Its bytes."""
        start, stop = bounds(chunk.number, self.chunk_bytes, self.sizes[chunk.file])
        return stop - start

    def is_kept(self, chunk: FileChunk) -> bool:
        """Whether this disk has a chunk."""
        if local_file(self.repository, self._files[chunk.file]) is not None:
            return True
        digest = self.digest(chunk)
        return digest is not None and self._cache.has(digest)

    def kept(self, chunk: FileChunk) -> bytes | None:
        """A chunk that this disk has: of the Hugging Face cache, else of the chunks that came before; else None."""
        path = local_file(self.repository, self._files[chunk.file])
        if path is not None:
            return _read(path, *bounds(chunk.number, self.chunk_bytes, self.sizes[chunk.file]))
        digest = self.digest(chunk)
        data = None if digest is None else self._cache.take(digest)
        return data if data is not None and len(data) == self.size_of(chunk) else None

    def has_chunk(self, chunk: FileChunk) -> bool:
        """Whether the repository has such a chunk."""
        return 0 <= chunk.number < self.count(chunk.file)

    def count(self, file: str) -> int:
        """The chunks of a file; 0 where there is no such file."""
        return -(-self.sizes.get(file, 0) // self.chunk_bytes)

    def digests(self, file: str) -> list[bytes]:
        """The SHA-256 of each chunk of a file that this disk has, b"" for one that it lacks."""
        chunks = [FileChunk(file, number) for number in range(self.count(file))]
        if chunks and local_file(self.repository, self._files[file]) is not None:
            kept = (self.kept(chunk) for chunk in chunks)
            return [b"" if data is None else hashlib.sha256(data).digest() for data in kept]
        noted = (self.digest(chunk) for chunk in chunks)
        return [digest if digest and self._cache.has(digest) else b"" for digest in noted]

    def fetch(self, chunks: Sequence[FileChunk]) -> list[FetchedChunk]:
        """Chunks of one file that follow each other, from the hub, and kept. What another program of this machine has
        fetched since, or fetches at the moment, is taken from the disk.

        Raises what `HubRanges` raises.
        """
        file = self._files[chunks[0].file]
        assert [chunk.number for chunk in chunks] == list(range(chunks[0].number, chunks[0].number + len(chunks)))
        with self._claimed(file, chunks):
            kept = {chunk: self.kept(chunk) for chunk in chunks}
            found = {chunk: FetchedChunk(data, b"", False) for chunk, data in kept.items() if data is not None}
            for run in runs([chunk for chunk in chunks if chunk not in found], len(chunks)):
                found |= self._fetch(file, run)
        return [found[chunk] for chunk in chunks]

    def _fetch(self, file: HubFile, run: Sequence[FileChunk]) -> dict[FileChunk, FetchedChunk]:
        """Chunks that follow each other, in one range from the hub, and kept."""
        start, stop = run[0].number * self.chunk_bytes, bounds(run[-1].number, self.chunk_bytes, file.size)[1]
        data = self.ranges.read(file, start, stop)
        found = {}
        for number, chunk in enumerate(run):
            piece = data[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]
            found[chunk] = FetchedChunk(piece, self.keep(chunk, piece), True)
        return found

    @contextlib.contextmanager
    def _claimed(self, file: HubFile, chunks: Sequence[FileChunk]) -> Iterator[None]:
        """Let nobody else of this machine fetch these chunks meanwhile; where nothing can be kept, anybody may."""
        if self._tables is None:
            yield
            return
        with contextlib.ExitStack() as claim:
            try:
                self._tables.mkdir(exist_ok=True)
                start, stop = chunks[0].number * DIGEST_BYTES, (chunks[-1].number + 1) * DIGEST_BYTES
                claim.enter_context(claimed(self._table(file), start, stop, self.ranges.check_wanted))
            except OSError as error:
                self._trouble.refused(error)
            yield

    def keep(self, chunk: FileChunk, data: bytes) -> bytes:
        """Put a chunk that came into the cache, and write down which hash it has. Returns the hash."""
        digest = self.note(chunk, data)
        self._cache.put(digest, data)
        return digest

    def note(self, chunk: FileChunk, data: bytes) -> bytes:
        """Write down which hash a chunk has, for the next start. Returns the hash."""
        digest = hashlib.sha256(data).digest()
        self.note_digest(chunk, digest)
        return digest

    def note_digest(self, chunk: FileChunk, digest: bytes) -> None:
        """The same of a chunk that need not be here."""
        if self._tables is not None:
            path = self._table(self._files[chunk.file])
            try:
                path.parent.mkdir(exist_ok=True)
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644), "wb", buffering=0) as table:
                    os.pwrite(table.fileno(), digest, chunk.number * DIGEST_BYTES)
                self._trouble.accepted()
            except OSError as error:
                self._trouble.refused(error)

    def read(self, file: str, start: int, stop: int, take: Callable[[FileChunk], bytes] | None = None) -> bytes:
        """Bytes of a file, by whole chunks, which are kept. `take` gets one chunk (`chunk`)."""
        if not 0 <= start <= stop <= self.sizes.get(file, -1):
            raise WeightsError(f"{file[:80]!r} of {self.repository} has no bytes [{start}, {stop})")
        wanted = numbers(start, stop, self.chunk_bytes)
        data = b"".join((take or self.chunk)(FileChunk(file, number)) for number in wanted)
        first = wanted.start * self.chunk_bytes
        return data[start - first : stop - first]

    def chunk(self, chunk: FileChunk) -> bytes:
        """A chunk, from here or from the hub."""
        found = self.kept(chunk)
        return found if found is not None else self.fetch([chunk])[0].data

    def warn_of_room(self, chunks: Sequence[FileChunk]) -> None:
        """Say so where the cache is too small to keep these chunks for the next start."""
        wanted = sum(self.size_of(chunk) for chunk in chunks)
        if wanted > self._cache.limit:
            log.warning(
                "this part of %s has %d bytes and %d of weights are kept on disk, so the next start fetches it again: "
                "give a larger --weights-cache-size",
                self.repository,
                wanted,
                self._cache.limit,
            )

    def _table(self, file: HubFile) -> Path:
        assert self._tables is not None
        return self._tables / f"{file.etag}-{self.chunk_bytes}"

    def digest(self, chunk: FileChunk) -> bytes | None:
        """The SHA-256 of a chunk as it was noted here; the chunk need not be here any more."""
        if self._tables is None:
            return None
        with contextlib.suppress(OSError), self._table(self._files[chunk.file]).open("rb", buffering=0) as table:
            digest = os.pread(table.fileno(), DIGEST_BYTES, chunk.number * DIGEST_BYTES)
            return digest if len(digest) == DIGEST_BYTES and any(digest) else None
        return None


def _read(path: Path, start: int, stop: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(stop - start)
    except OSError:
        return None
    return data if len(data) == stop - start else None
