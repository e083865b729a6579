"""Files of the Hugging Face cache that this program still writes, and those that it left when it was killed.

A file that is put together is called `blobs/ETAG.part` until it is whole, so that there is at most one for each file,
and whoever is next finds it. Its writer holds a lock (flock(2)) on it, which the system lets go when a program dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tllm.core.disk import PART, remove_stale
from tllm.hub.folders import hub_cache
from tllm.hub.repository import ETAG

log = logging.getLogger("tllm.weights")

UNWANTED_SECONDS = 7 * 24 * 3600.0
"""Of a part that nobody has written to for so long, nobody makes a file any more."""


def part_of(blob: Path) -> Path:
    """What a blob is called until it is whole."""
    return blob.with_name(blob.name + PART)


def part_bytes(blob: Path) -> int:
    """How much there is of a blob that was being put together."""
    try:
        return part_of(blob).stat(follow_symlinks=False).st_size
    except OSError:
        return 0


@contextlib.contextmanager
def held_part(path: Path) -> Iterator[BinaryIO]:
    """The file at `path`, with what a program that was killed had written, for reading and writing. Another program
    that has it is waited for. It is removed at the end unless it was given another name.

    OSError where the disk takes no file, or gives no locks.
    """
    file = _locked(path)
    try:
        yield file
    finally:
        if _is_at(file, path):
            path.unlink(missing_ok=True)
        file.close()  # only now may another take the lock: nobody removes what is somebody else's


def remove_left_parts() -> None:
    """Remove what programs that were killed left in the Hugging Face cache: parts of files that are whole now, parts
    that nobody took up for a week, and what else is called so and nobody has written to for an hour. What is being
    written stays, and what cannot be removed."""
    for folder in sorted(hub_cache().glob("models--*")):
        parts = sorted((folder / "blobs").glob(f"*{PART}"))
        kept = [path for path in parts if ETAG.fullmatch(path.name.removesuffix(PART))]
        for path in kept:
            _remove_unwanted(path)
        links = [*(folder / "snapshots").rglob(f"*{PART}"), *(folder / "refs").rglob(f"*{PART}")]
        remove_stale([*(set(parts) - set(kept)), *links])


def _remove_unwanted(path: Path) -> None:
    with contextlib.suppress(OSError):  # gone meanwhile, being written, or not ours
        blob, age = path.with_name(path.name.removesuffix(PART)), time.time() - path.stat().st_mtime
        if not blob.is_file() and age < UNWANTED_SECONDS:
            return
        with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                path.unlink()


def _locked(path: Path) -> BinaryIO:
    """The file at `path`, made if there is none, once nobody else has it."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = open(os.open(path, flags, 0o666), "r+b")  # noqa: SIM115  # whoever asked closes it
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another program writes %s: it is waited for", path)
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, path):
                return file
        except BaseException:  # an interrupt too
            file.close()
            raise
        file.close()  # whoever had it has removed it, or given it its name


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is what has this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False
