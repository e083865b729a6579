"""Where a model's bytes come from: a local folder (`LocalFiles`) or one on another node (`RemoteFiles`). No torch.

How several nodes pass the same bytes on to each other is in `gathered.py`.

A source counts in `bytes_read` each byte that it was given, so that what a rank read can be shown and tested.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tllm.core.disk import READABLE
from tllm.core.errors import WeightsError
from tllm.core.gguf_files import gguf_files, is_gguf
from tllm.weights.byte_spans import Spans, one_span
from tllm.weights.file_chunks import FileChunk

Ask = Callable[[str, int, int], bytes]
"""ask(file, start, stop) -> those bytes of a file that another node holds."""

READ_AHEAD = 64 * 1024
"""Bytes that are asked of another node at least: what a link moves in about the time of one round trip."""
FETCH_LIMIT = 8 * 1024 * 1024
"""Bytes asked for at most in one round trip."""


class ByteSource(Protocol):
    """Files by name. `bytes_read` grows by what was read; a file that ends too early is a WeightsError.

    One source serves one rank: ranks that load at the same time in one process each have their own count.
    """

    @property
    def bytes_read(self) -> int: ...

    def names(self) -> list[str]: ...

    def size(self, file: str) -> int: ...

    def read(self, file: str, start: int, stop: int) -> bytes: ...

    def read_spans(self, file: str, spans: Spans, out: memoryview) -> None:
        """Read runs of bytes one after the other into `out`, which has just their length."""

    def expect(self, wanted: Iterable[tuple[str, Spans]]) -> None:
        """Announce that these runs of these files will be read, in about this order: a remote source may begin to fetch
        them."""


class Fetch(Protocol):
    """How a node fetches bytes of a model whose files other nodes hold."""

    def __call__(self, file: str, start: int, stop: int) -> bytes:
        """Bytes straight from the coordinator: for small reads, headers above all."""

    def expect(self, chunks: Sequence[FileChunk], sizes: Mapping[str, int]) -> None:
        """Announce the chunks that will be asked for, in this order, and no others. `sizes`: of all files, in bytes."""

    def chunk(self, chunk: FileChunk) -> tuple[bytes, str]:
        """One chunk, its hash checked, and the node that gave it; "" where this node had it in its cache."""

    def found(self, folder: Path) -> None:
        """Announce that this node has the model's files in a folder, so that others may fetch them from it."""


class LocalFiles:
    """The files of one folder, read by position. Only names that the folder lists are read, whatever an index says.

    Of a GGUF file that is given instead, that file alone, or all pieces of a split one.
    """

    def __init__(self, folder: Path | str) -> None:
        given = Path(folder)
        self.folder = given.parent if is_gguf(given) else given
        self.bytes_read = 0
        self._descriptors: dict[str, int] = {}
        try:
            with os.scandir(self.folder) as entries:
                self._sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except OSError as error:
            raise WeightsError(f"cannot read the folder {self.folder}: {error.strerror}", READABLE) from error
        if is_gguf(given):
            self._sizes = {name: self._sizes[name] for name in gguf_files(self._sizes, given.name)}

    def names(self) -> list[str]:
        return sorted(self._sizes)

    def size(self, file: str) -> int:
        return _size(self._sizes, file, str(self.folder))

    def read(self, file: str, start: int, stop: int) -> bytes:
        return read_run(self, file, start, stop)

    def read_spans(self, file: str, spans: Spans, out: memoryview) -> None:
        assert len(out) == spans.nbytes
        # pread, not mmap: no page counts as this process's memory, and a file cut short is an error and not a SIGBUS.
        descriptor, width = self._descriptor(file), spans.width
        for i in range(spans.count):
            run, filled = out[i * width : (i + 1) * width], 0
            while filled < width:
                start = spans.start + i * spans.pitch + filled
                try:
                    got = os.preadv(descriptor, [run[filled:]], start)
                except OSError as error:
                    raise WeightsError(f"cannot read {self.folder / file}: {error.strerror}", READABLE) from error
                if got == 0:
                    raise WeightsError(
                        f"{self.folder / file} ends at byte {start}, before byte {start + width - filled}",
                        "the file changed while it was read; copy it again",
                    )
                filled += got
            self.bytes_read += width

    def expect(self, wanted: Iterable[tuple[str, Spans]]) -> None:
        """Does nothing: the system reads ahead."""

    def close(self) -> None:
        """Close what was opened; a later read opens it again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __del__(self) -> None:
        # A folder that could not be listed has no descriptors yet.
        if hasattr(self, "_descriptors"):
            self.close()

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            self.size(file)
            try:
                self._descriptors[file] = os.open(self.folder / file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise WeightsError(f"cannot open {self.folder / file}: {error.strerror}", READABLE) from error
        return self._descriptors[file]


class RemoteFiles:
    """Files that another node holds, which `ask` asks for; `sizes` is that node's listing.

    Small reads take the bytes after them along. Runs that are closer than one round trip is worth, or that make up
    more than half of what they span, are fetched together; `bytes_read` counts what was fetched, gaps included.
    """

    def __init__(self, ask: Ask, sizes: Mapping[str, int]) -> None:
        self.bytes_read = 0
        self._ask = ask
        self._sizes = dict(sizes)
        self._taken = 0
        self._ahead = ("", 0, b"")

    @property
    def fetched(self) -> int:
        """Bytes that came from other nodes."""
        return self._taken

    def names(self) -> list[str]:
        return sorted(self._sizes)

    def size(self, file: str) -> int:
        return _size(self._sizes, file, "the other node's listing")

    def expect(self, wanted: Iterable[tuple[str, Spans]]) -> None:
        """Does nothing: bytes are asked for when they are read."""

    def read(self, file: str, start: int, stop: int) -> bytes:
        assert 0 <= start <= stop
        if stop > self.size(file):
            raise WeightsError(f"{file} has {self.size(file)} bytes and byte {stop} was asked for")
        known, first, ahead = self._ahead
        if known != file or start < first or stop > first + len(ahead):
            last = min(max(stop, start + READ_AHEAD), self.size(file))
            got = b"".join(self._take(file, at, min(at + FETCH_LIMIT, last)) for at in range(start, last, FETCH_LIMIT))
            if stop - start >= READ_AHEAD:
                return got
            first, ahead = start, got
            self._ahead = (file, first, ahead)
        return ahead[start - first : stop - first]

    def read_spans(self, file: str, spans: Spans, out: memoryview) -> None:
        assert len(out) == spans.nbytes
        width, pitch = spans.width, spans.pitch
        gap = pitch - width
        together = max(1, FETCH_LIMIT // pitch) if gap <= max(width, READ_AHEAD // 4) else 1
        for first in range(0, spans.count, together):
            count = min(together, spans.count - first)
            start = spans.start + first * pitch
            got = memoryview(self.read(file, start, start + (count - 1) * pitch + width))
            for i in range(count):
                out[(first + i) * width : (first + i + 1) * width] = got[i * pitch : i * pitch + width]

    def _take(self, file: str, start: int, stop: int) -> bytes:
        got = self._ask(file, start, stop)
        if len(got) != stop - start:
            raise WeightsError(f"{file}: asked another node for {stop - start} bytes and got {len(got)}")
        self.bytes_read += len(got)
        self._taken += len(got)
        return got


def read_run(source: ByteSource, file: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file, by `read_spans`."""
    out = bytearray(stop - start)
    source.read_spans(file, one_span(start, stop), memoryview(out))
    return bytes(out)


def read_whole(source: ByteSource, file: str, limit: int) -> bytes:
    """All of a file. WeightsError for one of more than `limit` bytes."""
    size = source.size(file)
    if size > limit:
        raise WeightsError(f"{file} has {size} bytes and {limit} is the most that is read")
    return source.read(file, 0, size)


def _size(sizes: Mapping[str, int], file: str, where: str) -> int:
    if file not in sizes:
        raise WeightsError(f"{file} is missing from {where}", "copy the whole model folder, every file of it")
    return sizes[file]
