"""The shelf: what is kept is what was put there, is no more than the limit, and is never believed unseen."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from tests.support.faults.full_disk import no_room
from tllm.core.disk import STALE_SECONDS
from tllm.core.errors import ConfigError
from tllm.weights.chunk_cache import ChunkCache


def chunk(seed: int, size: int = 100) -> tuple[bytes, bytes]:
    data = bytes([seed]) * size
    return hashlib.sha256(data).digest(), data


def put(shelf: ChunkCache, seed: int, size: int = 100) -> bytes:
    digest, data = chunk(seed, size)
    assert shelf.put(digest, data)
    return digest


def test_what_is_put_is_there_again_later(tmp_path: Path) -> None:
    digest = put(ChunkCache(tmp_path / "new" / "folder", 1000), 1)
    again = ChunkCache(tmp_path / "new" / "folder", 1000)
    assert again.digests() == [digest]
    assert again.take(digest) == chunk(1)[1]
    assert again.take(chunk(2)[0]) is None


def test_what_a_killed_process_has_left_half_written_goes_after_a_while(tmp_path: Path) -> None:
    for name in ("fresh.part", "stale.part"):
        (tmp_path / f"{chunk(1)[0].hex()}.{name}").write_bytes(b"half")
    stale = tmp_path / f"{chunk(1)[0].hex()}.stale.part"
    os.utime(stale, (0, stale.stat().st_mtime - STALE_SECONDS - 10))
    ChunkCache(tmp_path, 1000)
    assert [path.name.split(".", 1)[1] for path in tmp_path.iterdir()] == ["fresh.part"]


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: data[:-1] + b"x", lambda data: b""])
def test_what_was_damaged_is_thrown_away(tmp_path: Path, spoil: object) -> None:
    shelf = ChunkCache(tmp_path, 1000)
    digest = put(shelf, 1)
    (tmp_path / digest.hex()).write_bytes(spoil(chunk(1)[1]))  # type: ignore[operator]
    assert shelf.take(digest) is None
    assert shelf.digests() == []
    assert put(shelf, 1) == digest and shelf.take(digest) == chunk(1)[1]


def test_the_longest_unused_make_room(tmp_path: Path) -> None:
    shelf = ChunkCache(tmp_path, 1000)
    digests = [put(shelf, seed) for seed in range(10)]
    for at, digest in enumerate(digests):
        os.utime(tmp_path / digest.hex(), (at, at))
    assert shelf.take(digests[0]) is not None, "used now"
    digests.append(put(shelf, 10))
    assert set(shelf.digests()) == {digests[0], *digests[3:]}, "no more than 9 tenths of the limit are left"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000


def test_a_smaller_limit_holds_from_the_start(tmp_path: Path) -> None:
    for seed in range(5):
        put(ChunkCache(tmp_path, 1000), seed)
    assert len(ChunkCache(tmp_path, 300).digests()) <= 3


def test_one_without_room_keeps_nothing(tmp_path: Path) -> None:
    digest, data = chunk(1)
    for shelf in (ChunkCache(tmp_path / "none", 0), ChunkCache(None, 1000), ChunkCache(tmp_path / "small", 99)):
        assert not shelf.put(digest, data)
        assert shelf.take(digest) is None and shelf.digests() == []
    assert not (tmp_path / "none").exists()


def test_a_folder_that_is_removed_meanwhile_is_made_anew(tmp_path: Path) -> None:
    """As by somebody who needs room and knows that what is in a cache comes again."""
    shelf = ChunkCache(tmp_path / "cache", 1000)
    digest = put(shelf, 1)
    shutil.rmtree(tmp_path / "cache")
    assert shelf.digests() == [] and shelf.take(digest) is None
    assert put(shelf, 1) == digest and shelf.digests() == [digest]


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"x" * 5000)
    shelf = ChunkCache(tmp_path, 300)
    for seed in range(5):
        put(shelf, seed)
    assert (tmp_path / "mine").read_bytes() == b"x" * 5000
    assert len(shelf.digests()) <= 3


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot keep weights in"):
        ChunkCache(tmp_path / "file" / "below", 1000)


def test_a_disk_that_takes_no_more_ends_nothing_and_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = ChunkCache(tmp_path, 1000)
    with no_room():
        for seed in range(3):
            assert not shelf.put(*chunk(seed))
    assert shelf.take(chunk(1)[0]) is None and not list(tmp_path.iterdir())
    put(shelf, 1)
    put(shelf, 2)
    assert caplog.messages == [
        f"weights in {tmp_path} cannot be written: File too large",
        f"weights in {tmp_path} can be written again",
    ]
