"""The receiving side of a socket: fills memory by a deadline, and while it waits lets this rank's own frames leave."""

from __future__ import annotations

import math
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence

from tllm.comm.links.errors import nothing_taken
from tllm.comm.links.frame import Memory
from tllm.comm.links.send_buffer import Unsent, shut

# A peer in step sends within this, and waking a sleeping thread costs about as much: half the time of a short sum.
# With a yield in each turn it costs others nothing, even where ranks and other work share a core.
SPIN_SECONDS = 100e-6
HUNG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)  # Linux tells it before what came is read


class ReceiveBuffer:
    """Reads one non-blocking socket. TimeoutError at the deadline, OSError when the other end is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reading = threading.RLock()  # so that close() never frees the socket under a reader
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        sock.setblocking(False)

    def read(self, memory: Memory | bytearray, size: int, until: float, meanwhile: Sequence[Unsent] = ()) -> None:
        """Fill `memory`, of `size` bytes, before the monotonic time `until`, sending what `meanwhile` holds."""
        start = 0
        with self._reading:
            while True:
                try:
                    got = self._sock.recv_into(memoryview(memory)[start:] if start else memory, size - start)
                except (BlockingIOError, ssl.SSLWantReadError):
                    self._await(until, meanwhile)
                    continue
                start += got
                if start == size:
                    return
                if not got:
                    raise ConnectionError("connection closed")

    def wait(self, seconds: float) -> bool:
        """Whether something, or the end, is there within `seconds`."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        return bool(self._readable.poll(milliseconds(seconds)))

    @property
    def is_over(self) -> bool:
        """Whether the other end has hung up; what it sent before may still be here."""
        hung_up = select.poll()
        try:
            hung_up.register(self._sock, HUNG_UP)
        except ValueError:  # closed here
            return True
        return bool(hung_up.poll(0))

    def close(self) -> None:
        """Close, waking a thread that reads."""
        shut(self._sock)
        with self._reading:
            self._sock.close()

    def _await(self, until: float, meanwhile: Sequence[Unsent]) -> None:
        """Return when there may be something to read, or something more was sent."""
        unsent = [one for one in meanwhile if not one.done]
        if unsent:
            push_any(unsent, until, self._sock)
            return
        now = time.monotonic()
        spin_until = now + SPIN_SECONDS
        while now < spin_until:
            if self._readable.poll(0):
                return
            os.sched_yield()  # to the peer, if it waits for this very core
            now = time.monotonic()
        if now >= until or not self._readable.poll(milliseconds(until - now)):
            raise TimeoutError


def push_any(unsent: Sequence[Unsent], until: float, reading: socket.socket | None = None) -> None:
    """Wait until a socket of `unsent` takes more, or `reading` has something; TimeoutError at `until`."""
    ready = select.poll()
    by_file = {one.sock.fileno(): one for one in unsent}
    for file in by_file:
        ready.register(file, select.POLLOUT)
    if reading is not None:
        ready.register(reading, select.POLLIN)
    left = until - time.monotonic()
    events = ready.poll(milliseconds(left)) if left > 0 else []
    if not events:
        raise TimeoutError
    for file, _ in events:
        if file in by_file:
            by_file[file].push()


def push_all(unsent: Sequence[Unsent]) -> None:
    """Send the rest of every frame; LinkTimeout names a rank that does not take its own."""
    until = time.monotonic() + max(one.outbox.deadline for one in unsent)
    while left := [one for one in unsent if not one.done]:
        try:
            push_any(left, until)
        except TimeoutError as error:
            late = left[0].outbox
            raise nothing_taken(late.source, late.target, late.deadline) from error


def milliseconds(seconds: float) -> int | None:
    """As `poll` wants it: rounded up, None for ever."""
    return None if math.isinf(seconds) else math.ceil(seconds * 1000)
