"""The folder of pages: what is found again, what is deleted first, who may read it, and disks that are full."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from tllm.core.disk import STALE_SECONDS
from tllm.core.errors import ConfigError
from tllm.engine.page_store import page_folder as page_folder_module
from tllm.engine.page_store.page_folder import FULL_SECONDS, Box, PageFolder, box_of, covers

BOX = Box(0, 4, 0, 2)
NAMES = [bytes([n]) * 32 for n in range(20)]


def folder(path: Path, limit: int = 10_000, model: str = "model") -> PageFolder:
    return PageFolder(path / "pages", model, limit)


def put(pages: PageFolder, name: bytes, nbytes: int = 100, box: Box = BOX) -> bool:
    return pages.write(name, box, nbytes, lambda file: file.write(bytes(nbytes)) and None)


def test_a_folder_is_found_again(tmp_path: Path) -> None:
    first = folder(tmp_path)
    assert put(first, NAMES[0]) and put(first, NAMES[0], box=Box(4, 8, 0, 2, 7)) and put(first, NAMES[1])
    again = folder(tmp_path)
    assert NAMES[0] in again and NAMES[2] not in again
    assert sorted(again.boxes(NAMES[0])) == [BOX, Box(4, 8, 0, 2, 7)]
    assert again.path(NAMES[1], BOX).read_bytes() == bytes(100)
    assert (first.bytes_written, again.stats()["page_store_bytes"]) == (300, 300)
    assert NAMES[0] not in folder(tmp_path, model="other"), "another model's pages are not its own"


def test_nobody_else_can_read_what_was_asked(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        pages = folder(tmp_path)
        put(pages, NAMES[0])
    finally:
        os.umask(mask)
    path = pages.path(NAMES[0], BOX)
    assert path.stat().st_mode & 0o777 == 0o600
    for parent in (path.parent, pages.folder, pages.root):
        assert parent.stat().st_mode & 0o777 == 0o700
    pages.root.chmod(0o750)
    with pytest.raises(ConfigError, match=r"mode 0750 .* \(0700\)\nhint: chmod 700"):
        folder(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "pages").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot keep pages in .*pages.*\nhint: give another --cache-dir"):
        folder(tmp_path)


def test_least_recently_used_files_go_first_and_later_pages_before_earlier_ones(tmp_path: Path) -> None:
    pages = folder(tmp_path, limit=1000)
    for n in range(10):
        put(pages, NAMES[n])
        pages.touch(NAMES[n], BOX, n % 5, now=1e9 + (n >= 5))  # two sequences of five pages
    pages.touch(NAMES[0], BOX, 0, now=2e9)
    assert put(pages, NAMES[10]), "which makes 1,100 bytes; 900 may be left"
    assert [n for n in range(11) if NAMES[n] in pages] == [0, 1, 2, 5, 6, 7, 8, 9, 10]
    assert [n for n in range(11) if pages.path(NAMES[n], BOX).exists()] == [0, 1, 2, 5, 6, 7, 8, 9, 10]
    assert not put(pages, NAMES[11], nbytes=1001), "more than there is room for at all"


def test_what_is_written_while_the_folder_is_read_is_known_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread writes, and has the folder read once more, as so much was written since."""
    pages, walk = folder(tmp_path, limit=1000), page_folder_module._files
    writer, walks = threading.Thread(target=put, args=(pages, NAMES[1])), list[Path]()

    def files(root: Path) -> Iterator[os.DirEntry[str]]:
        found = list(walk(root))
        walks.append(root)
        if len(walks) == 1:
            writer.start()
            writer.join(0.5)
        yield from found

    monkeypatch.setattr(page_folder_module, "_files", files)
    pages.scan()
    writer.join()
    assert len(walks) == 2 and NAMES[1] in pages


def test_the_limit_is_for_all_models_and_servers(tmp_path: Path) -> None:
    old, new = folder(tmp_path, 1000, "old"), folder(tmp_path, 1000, "new")
    for n in range(5):
        put(old, NAMES[n])
        old.touch(NAMES[n], BOX, 0, now=1e9)
        put(new, NAMES[n])
    put(new, NAMES[5])
    assert sum(path.is_file() for path in (tmp_path / "pages").rglob("*")) == 9
    assert sum(old.path(NAMES[n], BOX).exists() for n in range(5)) == 3


def test_what_a_killed_process_left_goes_after_a_while_and_other_files_stay(tmp_path: Path) -> None:
    pages = folder(tmp_path)
    put(pages, NAMES[0])
    near = pages.path(NAMES[0], BOX).parent
    for name in ("fresh.part", "stale.part", "notes.txt", "0" * 64 + ".0-4.0-2x"):
        (near / name).write_bytes(b"x")
    os.utime(near / "stale.part", (0, os.path.getmtime(near / "fresh.part") - STALE_SECONDS - 10))
    assert len(folder(tmp_path).boxes(NAMES[0])) == 1
    assert sorted(path.name for path in near.iterdir())[:2] == ["0" * 64 + f".{BOX}", "0" * 64 + ".0-4.0-2x"]
    assert {path.name for path in near.iterdir()} >= {"fresh.part", "notes.txt"}
    assert not (near / "stale.part").exists()


def test_a_full_disk_ends_saving_for_a_while_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pages = folder(tmp_path)
    put(pages, NAMES[0])

    def full(file: BinaryIO) -> None:
        file.write(b"begun")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with caplog.at_level(logging.WARNING):
        assert not pages.write(NAMES[1], BOX, 5, full)
        assert not pages.write(NAMES[2], BOX, 5, full)
        assert not put(pages, NAMES[3])
    assert [record.message for record in caplog.records] == [
        f"pages in {tmp_path / 'pages'} cannot be written: No space left on device"
    ]
    assert NAMES[0] in pages and put(pages, NAMES[0]), "what is there is there"
    assert [path.name for path in pages.root.rglob("*") if path.is_file()] == [pages.path(NAMES[0], BOX).name]
    assert pages.stats()["page_store_refused"] == 1
    now[0] += FULL_SECONDS
    assert put(pages, NAMES[3]), "somebody has made room"
    assert caplog.messages[1:] == [f"pages in {tmp_path / 'pages'} can be written again"]


def test_a_disk_on_which_no_folder_can_be_made_is_gone_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a node that joins while its disk is full; what was there before is read."""
    (tmp_path / "pages").mkdir(mode=0o700)
    mkdir = Path.mkdir

    def full(self: Path, *rest: Any, **more: Any) -> None:
        if not self.is_dir():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        mkdir(self, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        pages = folder(tmp_path)
        assert not pages.can_write and not pages.names()
    monkeypatch.setattr(page_folder_module, "FULL_SECONDS", 0.0)
    assert put(pages, NAMES[0])


def test_a_file_that_is_no_use_is_deleted_and_the_first_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pages = folder(tmp_path)
    put(pages, NAMES[0])
    put(pages, NAMES[1])
    pages.remove(NAMES[0], BOX, "it is torn")
    pages.remove(NAMES[1], BOX, "it is torn too")
    assert [record.message for record in caplog.records] == ["it is torn, and is deleted"]
    assert not any(name in pages or pages.path(name, BOX).exists() for name in NAMES[:2])
    pages.remove(NAMES[2], BOX)
    assert pages.stats()["page_store_damaged"] == 2


def test_two_servers_on_one_folder_write_the_same_page(tmp_path: Path) -> None:
    one, two = folder(tmp_path), folder(tmp_path)
    assert put(one, NAMES[0]) and put(two, NAMES[0])
    assert len(list(one.root.rglob("*.*"))) == 1
    two.remove(NAMES[0], BOX, "a copy")
    one.touch(NAMES[0], BOX, 0)
    one.scan()
    assert NAMES[0] not in one


def test_covering() -> None:
    wanted = Box(2, 4, 1, 3)
    assert box_of({3: (1, 3), 2: (1, 3)}) == wanted
    parts = [box_of(held) for held in ({2: (1, 3), 3: (1, 2)}, {2: (1, 2), 3: (1, 3)}, {2: (1, 3), 3: (2, 3)})]
    assert {box[:4] for box in parts} == {wanted[:4]} and len({*parts}) == 3 and not covers(parts, wanted)
    assert covers(parts, parts[2]) and covers([wanted], parts[0])
    assert covers([Box(0, 8, 0, 4)], wanted)
    assert covers([Box(0, 3, 0, 4), Box(3, 4, 0, 2), Box(3, 8, 2, 3)], wanted)
    assert not covers([Box(0, 3, 0, 4), Box(3, 4, 0, 2)], wanted)
    assert not covers([], wanted)
