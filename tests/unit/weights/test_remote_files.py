"""Files gathered by the chunk: the same bytes as the files have, each chunk asked for once, the rest asked straight."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tllm.core.errors import WeightsError
from tllm.weights.byte_source import READ_AHEAD
from tllm.weights.byte_spans import Spans, one_span
from tllm.weights.file_chunks import CHUNK_MIN, FileChunk, bounds
from tllm.weights.manifest import CheckedFiles, FileHashes, Manifest, checked, make_manifest
from tllm.weights.remote_files import FetchedFiles

SIZE = 5 * CHUNK_MIN + 77
CONTENT = {"a": random.Random(1).randbytes(SIZE), "b": random.Random(2).randbytes(1000)}
SIZES = {name: len(content) for name, content in CONTENT.items()}


class Others:
    """The other nodes: `kept` is what this node has itself; remembers what was asked for, and how."""

    def __init__(self, kept: set[FileChunk] = frozenset()) -> None:  # type: ignore[assignment]
        self.kept = kept
        self.asked: list[tuple[str, int, int]] = []
        self.chunks: list[FileChunk] = []
        self.expected: list[FileChunk] = []

    def __call__(self, file: str, start: int, stop: int) -> bytes:
        self.asked.append((file, start, stop))
        return CONTENT[file][start:stop]

    def expect(self, chunks: Sequence[FileChunk], sizes: Mapping[str, int]) -> None:
        assert sizes == SIZES
        self.expected = list(chunks)

    def chunk(self, chunk: FileChunk) -> tuple[bytes, str]:
        self.chunks.append(chunk)
        start, stop = bounds(chunk.number, CHUNK_MIN, SIZES[chunk.file])
        return CONTENT[chunk.file][start:stop], "" if chunk in self.kept else f"node {chunk.number % 2}"

    def found(self, folder: Path) -> None:
        raise AssertionError("nothing was found")


def runs(spans: Spans) -> bytes:
    return b"".join(CONTENT["a"][at : at + spans.width] for at in range(spans.start, spans.stop, spans.pitch))


@pytest.mark.parametrize(
    "spans",
    [
        one_span(0, SIZE),
        one_span(CHUNK_MIN - 1, CHUNK_MIN + 1),
        one_span(SIZE - 1, SIZE),
        Spans(5, 100, 1000, 300),
        Spans(CHUNK_MIN // 2, 10, 2 * CHUNK_MIN, 3),
    ],
    ids=["all", "over a seam", "the last byte", "columns", "far apart"],
)
def test_what_was_announced_comes_by_chunks(spans: Spans) -> None:
    others = Others()
    source, out = FetchedFiles(others, SIZES), bytearray(spans.nbytes)
    source.expect([("a", spans)])
    source.read_spans("a", spans, memoryview(out))
    assert bytes(out) == runs(spans)
    assert others.chunks == others.expected and others.asked == []
    assert source.bytes_read == source.fetched == sum(source.sources.values())
    assert source.bytes_read == sum(min(CHUNK_MIN, SIZE - n * CHUNK_MIN) for _, n in others.chunks)
    assert source.read("a", spans.start, spans.start + 1) == CONTENT["a"][spans.start : spans.start + 1]


def test_all_else_comes_straight_from_the_coordinator() -> None:
    others = Others()
    source = FetchedFiles(others, SIZES)
    source.expect([("a", one_span(0, 10))])
    assert source.read("b", 5, 9) == CONTENT["b"][5:9]
    assert source.read("a", CHUNK_MIN - 5, CHUNK_MIN + 5) == CONTENT["a"][CHUNK_MIN - 5 : CHUNK_MIN + 5]
    assert others.chunks == []
    assert others.asked == [("b", 5, 1000), ("a", CHUNK_MIN - 5, CHUNK_MIN - 5 + READ_AHEAD)]
    assert source.fetched == source.bytes_read == 995 + READ_AHEAD
    with pytest.raises(WeightsError, match="was asked for"):
        source.read("a", 0, SIZE + 1)
    with pytest.raises(WeightsError, match="missing"):
        source.read("c", 0, 1)


def test_what_the_node_kept_is_not_fetched() -> None:
    source = FetchedFiles(Others({FileChunk("a", 0), FileChunk("a", 1), FileChunk("a", 2)}), SIZES)
    source.expect([("a", one_span(0, SIZE))])
    assert source.read("a", 0, SIZE) == CONTENT["a"]
    assert source.bytes_read == SIZE
    assert source.sources == {"node 0": CHUNK_MIN, "node 1": CHUNK_MIN + 77}
    assert source.fetched == 2 * CHUNK_MIN + 77


def test_a_manifest_is_held_against_what_comes(tmp_path: Path) -> None:
    """Its chunks are read whole, so that is what is announced; one that is not true is found, whoever sent it."""
    for name, content in CONTENT.items():
        (tmp_path / name).write_bytes(content)
    manifest = make_manifest(tmp_path, list(CONTENT))
    others = Others()
    source = FetchedFiles(others, SIZES)
    seen = CheckedFiles(source, manifest)
    span = one_span(CHUNK_MIN - 3, CHUNK_MIN + 3)
    seen.expect([("a", span)])
    assert seen.read("a", span.start, span.stop) == CONTENT["a"][span.start : span.stop]
    assert others.chunks == [FileChunk("a", 0), FileChunk("a", 1)] and others.asked == []
    hashes = manifest.files["a"].sha256
    untrue = Manifest(1, manifest.chunk_bytes, {"a": FileHashes(SIZE, [hashes[1], *hashes[1:]])})
    with pytest.raises(WeightsError, match="are not what"):
        CheckedFiles(source, untrue).read("a", 0, 5)
    assert checked(source) is source, "there is no manifest among these files"
