"""Files of the Hugging Face cache that this program still writes, and those that it left when it ended early.

A file is called `blobs/ETAG.part` until it is whole, so that there is at most one for each file, and whoever is next
finds it and goes on. Its writer holds a lock (flock(2)) on it, which the system lets go when a program dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from tllm.core.disk import PART, remove_stale
from tllm.core.model_folders import folder_of_repo
from tllm.hub.folders import hub_cache, snapshot_folder
from tllm.hub.repository import ETAG, HubFile, Repository

log = logging.getLogger("tllm.weights")

UNWANTED_SECONDS = 7 * 24 * 3600.0
"""Of a part that nobody has written to for so long, nobody makes a file any more."""

HASHED_BYTES = 1 << 20


def blob_of(repository: Repository, file: HubFile) -> Path:
    """What a file is called by its hash, be it there or not; those of all commits are links to these."""
    return hub_cache() / folder_of_repo(repository.repo) / "blobs" / file.etag


def is_whole(blob: Path, file: HubFile) -> bool:
    return blob.is_file() and blob.stat().st_size == file.size


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
    """The file at `path`, with what was written of it before, for reading and writing. Another program that has it is
    waited for. What it holds at the end stays for whoever goes on.

    OSError where the disk takes no file, or gives no locks.
    """
    with _locked(path) as file:  # until whose end nobody else takes the lock: nobody removes what is somebody else's
        try:
            yield file
        finally:
            if file.seek(0, os.SEEK_END) == 0 and _is_at(file, path):
                path.unlink(missing_ok=True)


def fill_part(part: BinaryIO, file: HubFile, step: int, pieces: Callable[[int], Iterator[bytes]]) -> int | None:
    """Write what a part of a file lacks, which `pieces` gives from a byte on, a multiple of `step`, and see to it that
    all is on the disk. How many bytes were there; None, and nothing in it, where the whole has not the hash that the
    hub gives.

    If it has not, a machine that lost power may have left what was never written, so that all is written once more.
    """
    size = part.seek(0, os.SEEK_END)
    begun = size // step * step if size <= file.size else 0
    for first in dict.fromkeys((begun, 0)):
        digest = file.hasher()
        part.seek(0)
        for at in range(0, first, HASHED_BYTES):
            digest.update(part.read(min(HASHED_BYTES, first - at)))
        part.truncate(part.seek(first))
        for data in pieces(first):
            digest.update(data)
            part.write(data)
        if digest.hexdigest() == file.etag:
            part.flush()
            os.fsync(part.fileno())
            return first
    part.truncate(0)
    return None


def link_blob(repository: Repository, file: HubFile) -> None:
    """Let the file's place in its commit be a link to the blob, in one step: another program may do the same, or read
    it meanwhile."""
    place, blob = snapshot_folder(repository.repo, repository.commit) / file.name, blob_of(repository, file)
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.with_name(f"{place.name}.{secrets.token_hex(4)}{PART}")
    try:
        beside.symlink_to(os.path.relpath(blob, place.parent))
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


def remove_left_parts() -> None:
    """Remove what programs that ended early left in the Hugging Face cache: parts of files that are whole now, parts
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
