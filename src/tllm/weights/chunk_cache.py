"""`ChunkCache`: chunks of weights that a node keeps on its disk, to take them up again and to pass them on. No
torch."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from pathlib import Path

from tllm.core.disk import PART, DiskTrouble, remove_stale, whole_file
from tllm.core.errors import ConfigError

log = logging.getLogger("tllm.weights")

ROOM_LEFT = 0.9
"""Share of the limit that is left when chunks are evicted, so that not every new chunk evicts another."""


class ChunkCache:
    """Each chunk is a file named by its SHA-256, which it must still have when it is taken up again.

    At most `limit` bytes are kept; those unused for longest go first. With no folder, or a limit of 0, nothing is
    kept. Several processes may share a folder; what one that was killed has left half written goes when another begins
    an hour later. Its methods may be called from any thread.
    """

    def __init__(self, folder: Path | None, limit: int) -> None:
        self._folder = folder if limit > 0 else None
        self._limit = limit
        self._lock = threading.Lock()
        self._used = 0
        self._trouble = DiskTrouble(log, f"weights in {folder}")
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_stale(self._folder.glob(f"*{PART}"))  # they count in no limit
            self._used = self._make_room()
        except OSError as error:
            raise ConfigError(
                f"cannot keep weights in {self._folder}: {error.strerror}", "give another --weights-cache"
            ) from error

    @property
    def folder(self) -> Path | None:
        """Where chunks are kept; None if nothing is."""
        return self._folder

    @property
    def limit(self) -> int:
        """Bytes that are kept at most."""
        return self._limit if self._folder is not None else 0

    def has(self, digest: bytes) -> bool:
        """Whether there is a chunk by this hash; that it has not changed since shows when it is taken."""
        return self._folder is not None and (self._folder / digest.hex()).is_file()

    def digests(self) -> list[bytes]:
        """The SHA-256 of every chunk in the cache."""
        return [bytes.fromhex(path.name) for path in self._chunks()]

    def take(self, digest: bytes) -> bytes | None:
        """The chunk with this hash, or None. A file that has changed on the disk since is removed and counts as
        missing."""
        if self._folder is None:
            return None
        path = self._folder / digest.hex()
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:  # not there, or gone again: another process may have made room
            return None
        if hashlib.sha256(data).digest() == digest:
            return data
        log.warning("%s is damaged, and is thrown away", path)
        with contextlib.suppress(OSError):  # a disk that can only be read
            path.unlink(missing_ok=True)
        return None

    def put(self, digest: bytes, data: bytes) -> bool:
        """Store a chunk whose hash was checked. Returns whether it was stored: a disk that takes no more does not end
        the loading, and is told of once."""
        if self._folder is None or len(data) > self._limit:
            return False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with whole_file(self._folder / digest.hex(), synced=False) as file:
                file.write(data)
        except OSError as error:
            self._trouble.refused(error)
            return False
        self._trouble.accepted()
        with self._lock:
            self._used += len(data)
            if self._used > self._limit:
                self._used = self._make_room()
        return True

    def _make_room(self) -> int:
        """Evict the least recently used chunks where there is more than the limit. Returns the bytes that are left."""
        kept = []
        for path in self._chunks():
            with contextlib.suppress(OSError):
                facts = path.stat()
                kept.append((facts.st_mtime_ns, facts.st_size, path))
        used = sum(size for _, size, _ in kept)
        if used <= self._limit:
            return used
        for _, size, path in sorted(kept):
            if used <= self._limit * ROOM_LEFT:
                break
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            used -= size
        return used

    def _chunks(self) -> list[Path]:
        if self._folder is None:
            return []
        try:
            return [path for path in self._folder.iterdir() if len(path.name) == 64 and set(path.name) <= HEX]
        except FileNotFoundError:  # somebody has removed it, to have room; `put` makes it anew
            return []


HEX = set("0123456789abcdef")
