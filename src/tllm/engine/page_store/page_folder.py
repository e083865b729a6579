"""`PageFolder`: the files of pages in one folder, by the pages' names. No torch.

    FOLDER/<model>/<first two digits of the name>/<name>.<layers>.<kv heads>[.<part>]

A file holds some layers and kv heads of one page, as one rank had them. Ranks of several plans, processes and servers
may share a folder: a file appears whole under its name (`os.replace`), and whoever finds it gone computes the page.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tllm.core.disk import PART, DiskTrouble, remove_stale, whole_file
from tllm.core.errors import ConfigError
from tllm.spec.cut import Range

log = logging.getLogger("tllm.engine")

FILE = re.compile(r"([0-9a-f]{64})\.(\d{1,6})-(\d{1,6})\.(\d{1,6})-(\d{1,6})(?:\.(\d{1,10}))?")
FULL_SECONDS = 60.0
"""A disk that took no more is tried again after so long."""

ROOM_LEFT = 0.9
"""Share of the limit that is left when files are deleted, so that not every new file deletes another."""

PAGE_NANOSECONDS = 10_000_000
"""By so much a page counts as used before the page that it follows, as it is of no use without that one."""

SCANS = 32
"""The folder is read again when this part of its limit was written here: other processes write to it as well."""


class Box(NamedTuple):
    """Layers [first, stop) and kv heads [first_head, stop_head) that a file holds of a page.

    Where it holds some of them alone, `part` is a number that tells these from others: layers may have unlike numbers
    of kv heads, and a rank a layer that lies apart. It is 0 where it holds all.
    """

    first: int
    stop: int
    first_head: int
    stop_head: int
    part: int = 0

    def __str__(self) -> str:
        name = f"{self.first}-{self.stop}.{self.first_head}-{self.stop_head}"
        return f"{name}.{self.part}" if self.part else name

    def has(self, layer: int, head: int) -> bool:
        """Whether a kv head of a layer is in it; its file may lack that if it is a part."""
        return self.first <= layer < self.stop and self.first_head <= head < self.stop_head


def box_of(heads: Mapping[int, Range]) -> Box:
    """The box of a file that holds these kv heads of each layer: the least that has them all."""
    if not heads:
        return Box(0, 0, 0, 0)
    firsts, stops = zip(*heads.values(), strict=True)
    box = Box(min(heads), max(heads) + 1, min(firsts), max(stops))
    if len(heads) == box.stop - box.first and {*firsts} == {box.first_head} and {*stops} == {box.stop_head}:
        return box
    digest = hashlib.sha256(repr(sorted(heads.items())).encode()).digest()
    return box._replace(part=int.from_bytes(digest[:4], "little") >> 1 | 1)


def covers(boxes: Collection[Box], wanted: Box) -> bool:
    """Whether files of these boxes are sure to hold each kv head of each layer that one of another box has."""
    if wanted in boxes:
        return True
    missing = {
        (layer, head)
        for layer in range(wanted.first, wanted.stop)
        for head in range(wanted.first_head, wanted.stop_head)
    }
    for box in boxes:
        if not box.part:
            missing = {one for one in missing if not box.has(*one)}
    return not missing


class PageFolder:
    """The files of one model's pages; `limit` is for the bytes of all models' files in `folder`.

    Least recently used files go first, and of files that were used together those of later pages. With a limit of 0,
    or for a minute after the disk took no more, nothing is written. Any thread may call it.

    ConfigError where the folder cannot be made, or is open to others than its owner: what lies there is what people
    have written to the model, and what it is made to believe that it has computed.
    """

    def __init__(self, folder: Path, model: str, limit: int) -> None:
        assert re.fullmatch(r"[\w-]+", model), "the model's name is that of a folder"
        self.root, self.folder, self.limit = folder, folder / model, limit
        self._trouble = DiskTrouble(log, f"pages in {folder}")
        self.bytes_written = self.bytes_read = self.num_damaged = 0
        self._lock = threading.Lock()
        self._boxes: dict[bytes, tuple[Box, ...]] = {}
        self._used = self._since_scan = 0
        make_private(self.root)
        try:
            make_private(self.folder)
        except ConfigError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            self._trouble.refused(error.__cause__)
        self.scan()

    @property
    def can_write(self) -> bool:
        """Whether it is of use to try."""
        return self.limit > 0 and not self._trouble.was_within(FULL_SECONDS)

    def __contains__(self, name: bytes) -> bool:
        """Whether there is some file of this page."""
        return name in self._boxes

    def boxes(self, name: bytes) -> tuple[Box, ...]:
        """What there is of a page, each box in a file."""
        return self._boxes.get(name, ())

    def names(self) -> list[bytes]:
        """All pages of which there is some file. Like `boxes` it waits for no scan: a node's event loop calls it."""
        return list(self._boxes)

    def has_file(self, name: bytes, box: Box) -> bool:
        """Whether this file is there, if only since another process wrote it."""
        if box not in self.boxes(name) and self.path(name, box).exists():
            with self._lock:
                self._note(name, box)
        return box in self.boxes(name)

    def path(self, name: bytes, box: Box) -> Path:
        """The file of a box of a page."""
        digits = name.hex()
        return self.folder / digits[:2] / f"{digits}.{box}"

    def write(self, name: bytes, box: Box, nbytes: int, fill: Callable[[BinaryIO], None]) -> bool:
        """Write a file by `fill(file)`, unless it is there; whether it is there now. A disk that is full ends all
        writing for a while, with one warning."""
        if self.has_file(name, box):
            return True
        if not self.can_write or nbytes > self.limit:
            return False
        path = self.path(name, box)
        try:
            for parent in (self.folder, path.parent):
                parent.mkdir(mode=0o700, exist_ok=True)
            with whole_file(path, 0o600, synced=False) as file:
                fill(file)
        except OSError as error:
            self._trouble.refused(error)
            return False
        self._trouble.accepted()
        with self._lock:
            self._note(name, box)
            self.bytes_written += nbytes
            self._used, self._since_scan = self._used + nbytes, self._since_scan + nbytes
            is_due = self._used > self.limit or self._since_scan * SCANS > self.limit
        if is_due:
            self.scan()
        return True

    def touch(self, name: bytes, box: Box, place: int, now: float | None = None) -> None:
        """The file was used: `now`, with other pages of its sequence, of which it is number `place`."""
        at = int((time.time() if now is None else now) * 1e9) - place * PAGE_NANOSECONDS
        with contextlib.suppress(OSError):
            os.utime(self.path(name, box), ns=(at, at))

    def remove(self, name: bytes, box: Box, why: str = "") -> None:
        """The file is gone, or is of no use (`why`) and is deleted. The first damaged one is warned of."""
        if why:
            self.num_damaged += 1
            (log.warning if self.num_damaged == 1 else log.debug)("%s, and is deleted", why)
            with contextlib.suppress(OSError):
                self.path(name, box).unlink(missing_ok=True)
        with self._lock:
            left = tuple(one for one in self._boxes.get(name, ()) if one != box)
            if left:
                self._boxes[name] = left
            else:
                self._boxes.pop(name, None)

    def scan(self) -> None:
        """Find what is there, and delete what is too much: the least recently used files of all models.

        Files that come meanwhile are noted after it, so that none is forgotten that it has not seen.
        """
        with self._lock:
            self._scan()

    def _note(self, name: bytes, box: Box) -> None:
        """There is such a file. A scan may have found it since it was written."""
        known = self._boxes.get(name, ())
        if box not in known:
            self._boxes[name] = (*known, box)

    def _scan(self) -> None:
        known: dict[bytes, tuple[Box, ...]] = {}
        found: list[tuple[int, int, str]] = []
        for entry in _files(self.root):
            with contextlib.suppress(OSError):
                if entry.name.endswith(PART):
                    remove_stale([Path(entry.path)])
                    continue
                facts = entry.stat(follow_symlinks=False)
                if FILE.fullmatch(entry.name) is not None:
                    found.append((facts.st_mtime_ns, facts.st_size, entry.path))
        used = sum(size for _, size, _ in found)
        if self.limit > 0 and used > self.limit:
            found.sort(reverse=True)
            while found and used > self.limit * ROOM_LEFT:
                _, size, path = found.pop()
                with contextlib.suppress(OSError):
                    os.unlink(path)
                used -= size
        own = f"{self.folder}{os.sep}"
        for _, _, path in found:
            if path.startswith(own) and (parts := FILE.fullmatch(path.rpartition(os.sep)[2])) is not None:
                name = bytes.fromhex(parts[1])
                known[name] = (*known.get(name, ()), Box(*map(int, parts.groups("0")[1:])))
        self._boxes, self._used, self._since_scan = known, used, 0

    def stats(self) -> dict[str, float]:
        """Totals since the start, under the names that metrics have."""
        return {
            "page_store_bytes": self._used,
            "page_store_written_bytes": self.bytes_written,
            "page_store_read_bytes": self.bytes_read,
            "page_store_damaged": self.num_damaged,
            "page_store_refused": self._trouble.count,
        }


def _files(root: Path) -> Iterator[os.DirEntry[str]]:
    """The files of all models' pages."""
    for model in _entries(root):
        for digits in _entries(model.path):
            yield from _entries(digits.path)


def _entries(folder: Path | str) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing in what is none, or is gone."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return list(entries)
    return []


def make_private(folder: Path) -> None:
    """Make a folder that only its owner can read. ConfigError where it cannot be made, or is open to others."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError as error:
        raise ConfigError(f"cannot keep pages in {folder}: {error.strerror}", "give another --cache-dir") from error
    mode = stat.S_IMODE(facts.st_mode)
    if facts.st_uid != os.geteuid() or mode & 0o077:
        raise ConfigError(
            f"{folder} has mode {mode:04o} and owner {facts.st_uid}; pages of the cache tell what people wrote to the "
            f"model, so they are kept where only user {os.geteuid()} can read and write (0700)",
            f"chmod 700 {folder}, or give another --cache-dir",
        )
