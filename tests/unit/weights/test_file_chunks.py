"""Chunks of files: which of them hold a part of a tensor, against every byte of it looked at by itself."""

from __future__ import annotations

import itertools

from tllm.weights.byte_spans import Spans
from tllm.weights.file_chunks import CHUNK_MAX, CHUNK_MIN, CHUNKS_WANTED, bounds, chunk_bytes, touched


def test_touched_are_the_chunks_of_each_byte() -> None:
    for start, width, gap, count in itertools.product((0, 3, 8, 11), (1, 5, 8, 17), (0, 1, 7, 30), (1, 2, 5)):
        spans = Spans(start, width, width + gap, count)
        at = [start + i * (width + gap) + j for i in range(count) for j in range(width)]
        assert list(touched(spans, 8)) == sorted({byte // 8 for byte in at}), spans


def test_the_chunks_of_a_file_are_all_of_it() -> None:
    for size in (1, 7, 8, 9, 64):
        parts = [range(*bounds(number, 8, size)) for number in range(-(-size // 8))]
        assert [byte for part in parts for byte in part] == list(range(size))


def test_chunks_grow_with_the_model() -> None:
    assert chunk_bytes({}) == CHUNK_MIN
    assert chunk_bytes({"a": CHUNK_MIN * CHUNKS_WANTED, "b": 5}) == CHUNK_MIN
    assert chunk_bytes({"a": CHUNK_MIN * CHUNKS_WANTED + 1, "b": 5}) == 2 * CHUNK_MIN
    assert chunk_bytes({"a": 10**12}) == CHUNK_MAX
