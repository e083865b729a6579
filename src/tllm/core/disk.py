"""Files that are there whole or not at all, paths that users give, how many files may be open, and what is said of a
disk that takes no more."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import resource
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from tllm.core.errors import AuthError, ConfigError

log = logging.getLogger("tllm")

PART = ".part"
"""What the name of a file ends with that is still written, or was when its program died."""

STALE_SECONDS = 3600.0
"""A file that nobody has finished for so long is left over from a program that was killed."""

READABLE = "see that it is there, and that this user may read it"
"""What to do about a file of a model that cannot be read."""

PRIVATE_DISK = "keep it on another disk, or mount this one with umask=077"
"""What to do about a secret on a disk that lets others read each file, as one with FAT may."""

LFS_POINTER = "is a pointer of Git LFS and not the file itself"
LFS_HINT = "`git lfs pull` in its folder fetches the files; or give the model's name, ORG/NAME"


def is_lfs_pointer(begins: bytes) -> bool:
    """Whether a file that begins so, with eight bytes or more, stands for a large one that `git clone` left out."""
    return begins.startswith(b"version ")


def given_path(text: str) -> Path:
    """The absolute path, without links, that a user means by this; `~` and `~NAME` are homes. ConfigError for what can
    be no path: of a user who has no home here, of links that lead in a circle, or with a null byte."""
    try:
        return Path(text).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ConfigError(f"{text[:200]!r} is no path here: {reason}", "give one that is there") from error


@contextlib.contextmanager
def whole_file(path: Path, mode: int = 0o666, *, synced: bool = True, replaces: bool = True) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block has ended well; else nothing is left of it.

    It is on the disk before it gets its name, so that a machine that loses power has the old file or the new one whole;
    what is checked by its hash when it is read, and made again, need not be `synced`. FileExistsError where it does not
    replace one and another was there first. `mode` is of the new file, less what this user's umask takes. What the
    block or the disk raises goes on.
    """
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(beside, flags, mode), "wb") as file:
            yield file
            if synced:
                file.flush()
                os.fsync(file.fileno())
        if replaces:
            beside.replace(path)
        else:
            _name_once(beside, path)
    except BaseException:  # an interrupt too leaves nothing behind
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What systems answer on disks without hard links, as those with FAT and some shares of a network."""


def _name_once(beside: Path, path: Path) -> None:
    """Rename a whole file. FileExistsError where another has the name already."""
    try:
        os.link(beside, path)
        beside.unlink()
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # as a rename would take the place of what another process has just made
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
            beside.rename(path)
        finally:
            os.close(folder)


@contextlib.contextmanager
def private_file(path: Path, *, replaces: bool = True) -> Iterator[BinaryIO]:
    """A `whole_file` that only its owner can read. AuthError, before anything is in it, where its disk lets others read
    each file."""
    with whole_file(path, 0o600, replaces=replaces) as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise AuthError(f"{path} would be readable by others: its disk keeps no modes of files", PRIVATE_DISK)
        yield file


def check_private(path: Path) -> None:
    """AuthError where others than its owner may read a secret."""
    if path.stat().st_mode & 0o077:
        raise AuthError(f"{path} can be read by others", f"chmod 600 {path}; or {PRIVATE_DISK}")


def remove_stale(parts: Iterable[Path]) -> None:
    """Remove those that nobody has written to for `STALE_SECONDS`: the programs that did were killed. One that cannot
    be removed, or is gone already, is passed over."""
    for path in parts:
        with contextlib.suppress(OSError):
            if time.time() - path.stat(follow_symlinks=False).st_mtime > STALE_SECONDS:
                path.unlink()


def write_whole(path: Path, content: bytes, variable: str) -> None:
    """Put a small file in its place. ConfigError where that fails; `variable` says where the folder lies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", f"free some space, or set {variable}") from error


MOST_OPEN = 10_240
"""Files that macOS lets a process have open where it names no limit (OPEN_MAX)."""


def open_files(wanted: int) -> int:
    """How many files this process may have open: as many as are `wanted`, or fewer where the system leaves fewer. Its
    own limit is raised as far as it must be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        soft = max(soft, min(wanted, MOST_OPEN if hard == resource.RLIM_INFINITY else hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(soft, wanted)


class DiskTrouble:
    """For what is gone without where it cannot be written. `what` goes before "cannot be written" in the log.

    `is_there`: whether the last write was refused. `count`: how many were. Any thread may call it.
    """

    def __init__(self, log: logging.Logger, what: str) -> None:
        self.is_there, self.count = False, 0
        self._log, self._what = log, what
        self._last = -math.inf
        self._lock = threading.Lock()

    def refused(self, error: OSError) -> None:
        """A write was refused."""
        with self._lock:
            is_new, self.is_there = not self.is_there, True
            self.count += 1
            self._last = time.monotonic()
        if is_new:
            self._log.warning("%s cannot be written: %s", self._what, error.strerror or error)

    def was_within(self, seconds: float) -> bool:
        """Whether a write was refused so short a time ago that another one is not worth a try."""
        return self.is_there and time.monotonic() - self._last < seconds

    def accepted(self) -> None:
        """A write went well."""
        if not self.is_there:
            return
        with self._lock:
            was_there, self.is_there = self.is_there, False
        if was_there:
            self._log.warning("%s can be written again", self._what)


_LINES = DiskTrouble(log, "lines for the operator")


def _print(words: str) -> None:
    print(words, flush=True)


def print_line(words: str, show: Callable[[str], object] = _print) -> None:
    """Print what a long-running command tells its operator, at once, on stdout, which may be a file on a full disk or a
    terminal that is gone. The command goes on all the same: the log says what failed, and not the words, as they may
    have a token. `show` prints them in another way."""
    try:
        show(words)
    except OSError as error:
        _LINES.refused(error)
    else:
        _LINES.accepted()
