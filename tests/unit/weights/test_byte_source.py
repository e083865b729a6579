"""Local and remote files: the same bytes, each one counted, and nothing outside the listing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tllm.core.errors import WeightsError
from tllm.weights.byte_source import FETCH_LIMIT, READ_AHEAD, LocalFiles, RemoteFiles
from tllm.weights.byte_spans import Spans

CONTENT = random.Random(0).randbytes(300_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a").write_bytes(CONTENT)
    (tmp_path / "b").write_bytes(b"bb")
    (tmp_path / "inner").mkdir()
    return tmp_path


class Fetches:
    """The other node: remembers what was asked for."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.asked: list[tuple[int, int]] = []

    def __call__(self, file: str, start: int, stop: int) -> bytes:
        self.asked.append((start, stop))
        return self.content[start:stop]


def runs(spans: Spans) -> bytes:
    starts = (spans.start + i * spans.pitch for i in range(spans.count))
    return b"".join(CONTENT[start : start + spans.width] for start in starts)


def test_local_reads_count_exactly(folder: Path) -> None:
    source = LocalFiles(folder)
    assert source.names() == ["a", "b"]
    assert source.size("a") == len(CONTENT)
    assert source.read("a", 10, 30) == CONTENT[10:30]
    assert source.bytes_read == 20
    spans = Spans(7, 100, 1000, 50)
    out = bytearray(spans.nbytes)
    source.read_spans("a", spans, memoryview(out))
    assert bytes(out) == runs(spans)
    assert source.bytes_read == 20 + 5000
    source.close()
    assert source.read("b", 0, 2) == b"bb"


def test_local_reads_what_the_kernel_was_asked_for(folder: Path) -> None:
    """This thread's count of bytes that read calls returned (rchar) grows by bytes_read and the counter file. Another
    thread of the process may read meanwhile, as that of pytest-xdist does whenever it is sent something."""
    counter = Path("/proc/thread-self/io")
    if not counter.exists():
        pytest.skip("this system does not count a thread's reads")

    def read_so_far() -> tuple[int, int]:
        text = counter.read_text()
        return int(text.split()[1]), len(text)

    source, out = LocalFiles(folder), bytearray(50_000)
    source.read("a", 0, 1)
    before, own = read_so_far()
    source.read_spans("a", Spans(0, 1000, 5000, 50), memoryview(out))
    after, _ = read_so_far()
    assert 50_000 <= after - before <= 50_000 + 2 * own
    assert source.bytes_read == 50_001


@pytest.mark.parametrize("file", ["c", "../a", "inner", "/etc/hostname", ""])
def test_only_listed_files(folder: Path, file: str) -> None:
    with pytest.raises(WeightsError, match="missing"):
        LocalFiles(folder).read(file, 0, 1)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="nowhere"):
        LocalFiles(tmp_path / "nowhere")


def test_a_file_cut_short_while_open(folder: Path) -> None:
    source = LocalFiles(folder)
    (folder / "a").write_bytes(CONTENT[:100])
    with pytest.raises(WeightsError, match="ends at byte 100, before byte 200"):
        source.read("a", 50, 200)


def test_remote_small_reads_share_a_fetch() -> None:
    fetch = Fetches(CONTENT)
    source = RemoteFiles(fetch, {"a": len(CONTENT)})
    assert source.read("a", 0, 8) == CONTENT[:8]
    assert source.read("a", 8, 5000) == CONTENT[8:5000]
    assert fetch.asked == [(0, READ_AHEAD)]
    assert source.read("a", len(CONTENT) - 3, len(CONTENT)) == CONTENT[-3:]
    assert fetch.asked[1:] == [(len(CONTENT) - 3, len(CONTENT))], "not past the end"
    assert source.bytes_read == READ_AHEAD + 3


@pytest.mark.parametrize(
    ("spans", "fetches"),
    [
        (Spans(11, 80_000, 80_000, 1), [(11, 80_011)]),
        (Spans(0, 40_000, 75_000, 4), [(0, 265_000)]),
        (Spans(0, 20_000, 100_000, 3), [(0, 65_536), (100_000, 165_536), (200_000, 265_536)]),
        (Spans(5, 10, 1000, 200), [(5, 199_015)]),
    ],
    ids=["one run", "more than half", "far apart", "near"],
)
def test_remote_runs(spans: Spans, fetches: list[tuple[int, int]]) -> None:
    fetch = Fetches(CONTENT)
    source, out = RemoteFiles(fetch, {"a": len(CONTENT)}), bytearray(spans.nbytes)
    source.read_spans("a", spans, memoryview(out))
    assert bytes(out) == runs(spans)
    assert fetch.asked == fetches
    assert source.bytes_read == sum(stop - start for start, stop in fetches)


def test_remote_fetches_are_bounded() -> None:
    asked = []

    def fetch(file: str, start: int, stop: int) -> bytes:
        asked.append(stop - start)
        return bytes(stop - start)

    size = 2 * FETCH_LIMIT + 100
    assert len(RemoteFiles(fetch, {"a": size}).read("a", 0, size)) == size
    assert asked == [FETCH_LIMIT, FETCH_LIMIT, 100]


def test_remote_answers_of_a_wrong_length() -> None:
    source = RemoteFiles(lambda file, start, stop: b"x", {"a": 100})
    with pytest.raises(WeightsError, match="100 bytes and got 1"):
        source.read("a", 0, 10)
    with pytest.raises(WeightsError, match="byte 101 was asked for"):
        source.read("a", 0, 101)
    with pytest.raises(WeightsError, match="missing"):
        source.read("b", 0, 1)
