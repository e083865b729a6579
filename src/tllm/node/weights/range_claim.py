"""`claimed`: lets only one program of a machine fetch a given part of a file at a time, so that it is fetched once."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_SECONDS = 0.02
"""From one try to the next: the system's own wait for a lock would go on where nobody wants the bytes any more."""


@contextmanager
def claimed(path: Path, start: int, stop: int, check_wanted: Callable[[], None]) -> Iterator[None]:
    """Hold bytes [start, stop) of a file against all other threads and programs of this machine that claim some of
    them; the file is made if there is none. While others hold them, `check_wanted` is called again and again, and ends
    the wait by raising.

    The system lets go of what a program held that has died. OSError where the disk takes no file. Systems without
    locks of open file descriptions (fcntl(2), F_OFD_SETLK: Linux alone has them) claim nothing: bytes may come twice.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", buffering=0) as file:
        if not hasattr(fcntl, "F_OFD_SETLK"):
            yield
            return
        while not _locked(file.fileno(), start, stop):
            check_wanted()
            time.sleep(LOOK_SECONDS)
        try:
            yield
        finally:  # by name, as a fork may hold the description for longer
            fcntl.fcntl(file.fileno(), fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, start, stop))


def _locked(descriptor: int, start: int, stop: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, start, stop))
    except BlockingIOError:
        return False
    return True


def _flock(kind: int, start: int, stop: int) -> bytes:
    """`struct flock`: its type, from where it counts, start, length, and a process, which is nobody here."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, stop - start, 0)
