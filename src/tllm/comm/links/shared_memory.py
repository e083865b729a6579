"""`SharedMemory`: memory of ranks that are processes of one user on one machine, for sums that need no link.

The ranks meet over their links, which are authenticated: the first one makes a file in memory that only its user may
open, and tells the others its name, of 128 random bits. Whoever finds a file of that name, of the same user and closed
to all others, is on the same machine, and sees what the first one sees. When all have opened it, the file is removed.
What is in it is not encrypted: it never leaves the memory of this machine, and who could read it there, could read the
memory of the processes as well.

What a rank says there: the number of the piece of a sum that it has come to, and what its last two pieces are
(csrc/shared_sum.c). Who waits for a rank also watches its link, on which the end of a process shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from tllm.comm.links.errors import nothing_sent, refused_link, source_gone
from tllm.comm.links.link import Link
from tllm.core.errors import LinkError
from tllm.core.timing import AwakeClock

FOLDER = Path("/dev/shm")
"""Files that are memory, on Linux."""

PREFIX = "tllm-sums-"
NAME = re.compile(PREFIX + r"[0-9a-f]{32}")
NAME_BYTES = 64

PLACES, LINE, WORD = 2, 64, 8
"""Pieces of a rank that are there at a time; bytes of what it says, of which each number is a word."""

PLACE_BYTES = 256 * 1024
"""Of a place; longer tensors are summed in pieces. A rank's places stay in a core's second cache."""

PAUSE_SECONDS = 0.0001
"""A sleep between two looks at what the others have come to. Ranks that are in step never sleep, since the kernel
waits in a loop first; who is later than that has work to do, perhaps on this very core."""

LOOK_SECONDS = 0.02
"""How often who waits looks whether the others are there still."""


class SharedMemory:
    """One rank's view; `send` and `recv` are its links to and from the others, and `seconds` what waiting for one of
    them may take."""

    def __init__(
        self, file: int, rank: int, send: Mapping[int, Link], recv: Mapping[int, Link], seconds: float
    ) -> None:
        self.rank, self.ranks, self.place_bytes = rank, len(recv) + 1, PLACE_BYTES
        self.deadline = seconds
        self._send, self._recv = send, recv
        self._mapped = mmap.mmap(file, bytes_of(self.ranks))
        self._words = memoryview(self._mapped).cast("q")
        self.arrivals = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        self.places = self.arrivals + _front(self.ranks)

    def wait(self, number: int, piece: int) -> None:
        """Return when every other rank has come to this piece.

        LinkTimeout after the deadline, LinkClosed where a rank is lost, FrameError where it has come with another
        piece. Both links with that rank are ended then, so that it finds out, too.
        """
        for rank in self._recv:
            try:
                self._wait_for(rank, number)
                self._check(rank, number, piece)
            except LinkError:
                self._send[rank].interrupt()
                self._recv[rank].interrupt()
                raise

    def _check(self, rank: int, number: int, piece: int) -> None:
        link, said = self._recv[rank], self._words[rank * LINE // WORD + 1 + number % PLACES]
        if said != piece:
            expected = f"piece {number} of {piece // 8} numbers of kind {piece % 8}"
            got = f"{said // 8} numbers of kind {said % 8} to sum"
            raise refused_link(link.source, link.target, got, expected)

    def _wait_for(self, rank: int, number: int) -> None:
        link, clock = self._recv[rank], AwakeClock()
        what, began = f"piece {number} of a sum", clock()
        look = began
        while not self._has_come(rank, number):
            now = clock()
            if now >= look:
                look = now + LOOK_SECONDS
                if link.is_over and not self._has_come(rank, number):
                    raise source_gone(link.source, link.target, what, "its link is closed")
                if now - began > self.deadline:
                    raise nothing_sent(link.source, link.target, self.deadline, what)
            time.sleep(PAUSE_SECONDS)

    def _has_come(self, rank: int, number: int) -> bool:
        return self._words[rank * LINE // WORD] >= number


def meet_in_memory(
    rank: int, send: Mapping[int, Link], recv: Mapping[int, Link], is_able: bool, seconds: float
) -> SharedMemory | None:
    """Memory that this rank of a group shares with all others, who call this too; None on all where one has none.

    `is_able`: whether this rank can use it. The first rank makes the file, and all hear what became of it.
    """
    with contextlib.ExitStack() as stack:
        if rank == 0:
            name = _made(len(recv) + 1) if is_able else ""
            stack.callback(_remove, name)
            _tell(send, name)
        else:
            name = recv[0].recv_bytes(NAME_BYTES).decode("ascii", "replace")
        file = _opened(name, len(recv) + 1) if is_able else None
        if file is not None:
            stack.callback(os.close, file)
        _tell(send, "" if file is None else "opened")
        found = [link.recv_bytes(NAME_BYTES) for link in recv.values()]
        return None if file is None or not all(found) else SharedMemory(file, rank, send, recv, seconds)


def bytes_of(ranks: int) -> int:
    """Of the file of so many ranks."""
    return _front(ranks) + ranks * PLACES * PLACE_BYTES


def _front(ranks: int) -> int:
    """Bytes before the places, whole pages of the system."""
    return -(-ranks * LINE // mmap.PAGESIZE) * mmap.PAGESIZE


def _tell(send: Mapping[int, Link], word: str) -> None:
    for link in send.values():
        link.send_bytes(word.encode())


def _made(ranks: int) -> str:
    """The name of a new file; "" where there is no such folder, or no room in it."""
    name = PREFIX + secrets.token_hex(16)
    try:
        file = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return ""
    try:
        os.posix_fallocate(file, 0, bytes_of(ranks))  # else a full folder would end the process at the first write
    except OSError:
        _remove(name)
        return ""
    finally:
        os.close(file)
    return name


def _opened(name: str, ranks: int) -> int | None:
    """The file of that name, if it is the first rank's, for this user alone."""
    if not NAME.fullmatch(name):
        return None
    try:
        file = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(file)
    is_private = stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600 and found.st_uid == os.getuid()
    if is_private and found.st_size == bytes_of(ranks):
        return file
    os.close(file)
    return None


def _remove(name: str) -> None:
    if name:
        (FOLDER / name).unlink(missing_ok=True)
