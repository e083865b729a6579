"""Weight files in chunks, in which nodes pass them on: which chunks hold a part of a tensor. No torch.

All chunks of a model have the same length, which follows from its largest file, but the last of a file may be short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tllm.weights.byte_spans import Spans

CHUNK_MIN, CHUNK_MAX = 64 * 1024, 4 * 1024 * 1024
"""Bytes. With small chunks a node fetches little more than it needs; large ones take fewer requests for their
places."""
CHUNKS_WANTED = 1024
"""Of the largest file, where their length allows it."""


class FileChunk(NamedTuple):
    """One chunk of a file, by its number from 0."""

    file: str
    number: int


def chunk_bytes(sizes: Mapping[str, int]) -> int:
    """The length of a model's chunks, from the sizes of all its files."""
    return chunk_length(sizes.values(), CHUNK_MIN, CHUNK_MAX)


def chunk_length(sizes: Iterable[int], least: int, most: int) -> int:
    """The least length, doubled until the largest of these files has no more than `CHUNKS_WANTED` chunks, or to the
    most."""
    chunk, largest = least, max(sizes, default=0)
    while chunk < most and chunk * CHUNKS_WANTED < largest:
        chunk *= 2
    return chunk


def bounds(number: int, chunk: int, size: int) -> tuple[int, int]:
    """Bytes [start, stop) of a chunk of a file of `size` bytes."""
    return number * chunk, min((number + 1) * chunk, size)


def numbers(start: int, stop: int, chunk: int) -> range:
    """The numbers of the chunks that hold bytes [start, stop) of a file."""
    return range(start // chunk, -(-stop // chunk))


def touched(spans: Spans, chunk: int) -> Iterator[int]:
    """The numbers of the chunks that hold these runs, each once, in order."""
    last = -1
    for i in range(spans.count):
        start = spans.start + i * spans.pitch
        first, last = max(start // chunk, last + 1), max((start + spans.width - 1) // chunk, last)
        yield from range(first, last + 1)


def read_from_chunks(spans: Spans, chunk: int, read: Callable[[int], memoryview], out: memoryview) -> None:
    """Copy runs of bytes one after the other into `out`, which has just their length; `read(number)` gives a whole
    chunk."""
    assert len(out) == spans.nbytes
    filled = 0
    for i in range(spans.count):
        at = spans.start + i * spans.pitch
        stop = at + spans.width
        while at < stop:
            number, offset = divmod(at, chunk)
            taken = read(number)[offset : offset + stop - at]
            out[filled : filled + len(taken)] = taken
            at, filled = at + len(taken), filled + len(taken)


def runs(chunks: Sequence[FileChunk], longest: int) -> Iterator[list[FileChunk]]:
    """Chunks in the order in which they are used, cut where the next one does not follow in the same file."""
    run: list[FileChunk] = []
    for chunk in chunks:
        if run and (len(run) == longest or chunk != FileChunk(run[-1].file, run[-1].number + 1)):
            yield run
            run = []
        run.append(chunk)
    if run:
        yield run
