"""`TcpLink`, a link between two processes over a TCP connection of its own, plain or TLS; and its receiving side.

(The sending side is `send_buffer.py`.) One connection carries frames in one direction only, because Python's TLS
sockets cannot be read in one thread while another writes. TCP's flow control gives back-pressure: when the receiver
does not read, the sender's socket takes no more.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence

from tllm.comm.links.errors import closed_here, nothing_taken
from tllm.comm.links.framed_link import FramedLink
from tllm.comm.links.link import DEADLINE
from tllm.comm.links.send_buffer import PendingSend, SendBuffer, has_hung_up, is_authentic, milliseconds, shut
from tllm.core.timing import AwakeClock

# A peer in step sends within this, and waking a sleeping thread costs about as much: half the time of a short sum.
# With a yield in each turn it costs others nothing, even where ranks and other work share a core.
SPIN_SECONDS = 100e-6


class TcpLink(FramedLink):
    """One end of a TCP connection that carries frames from `source` to `target`."""

    def __init__(
        self, sock: socket.socket, source: int, target: int, epoch: int = 0, deadline: float = DEADLINE
    ) -> None:
        sender = SendBuffer(sock, source, target, deadline)
        super().__init__(sender, ReceiveBuffer(sock), source, target, epoch, deadline)


def set_socket_options(sock: socket.socket) -> None:
    """TCP_NODELAY, so that small frames leave at once, and keepalive.

    By keepalive a peer that lost its power is noticed within a minute, even on an idle link.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


class ReceiveBuffer:
    """The receiving side of one non-blocking socket: reads into memory by a deadline.

    While it waits it pushes this rank's own pending sends, so that two ranks may send each other long messages in one
    thread each. TimeoutError at the deadline, OSError when the other end is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.authentic, self.clock = is_authentic(sock), AwakeClock()
        self._sock = sock
        self._reading = threading.RLock()  # so that close() never frees the socket under a reader
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        sock.setblocking(False)

    def read(self, memory: memoryview, least: int, until: float, pending_sends: Sequence[PendingSend] = ()) -> int:
        """Read at least `least` bytes into `memory`, before `until` by this end's clock; returns how many.

        More, up to the length of `memory`, are read where they are there already. Pushes `pending_sends` while waiting.
        """
        start, size = 0, len(memory)
        with self._reading:
            while True:
                try:
                    count = self._sock.recv_into(memory[start:] if start else memory, size - start)
                except (BlockingIOError, ssl.SSLWantReadError):
                    self._await(until, pending_sends)
                    continue
                start += count
                if start >= least:
                    return start
                if not count:
                    raise ConnectionError("connection closed")

    def wait(self, seconds: float) -> bool:
        """Whether bytes, or the end of the connection, are there to read within `seconds`."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        return bool(self._readable.poll(milliseconds(seconds)))

    @property
    def is_over(self) -> bool:
        """Whether the other end has hung up; what it sent before may still be here."""
        return has_hung_up(self._sock)

    def close(self) -> None:
        """Close, waking a thread that reads."""
        shut(self._sock)
        with self._reading:
            self._sock.close()

    def _await(self, until: float, pending_sends: Sequence[PendingSend]) -> None:
        """Return when there may be something to read, or something more was sent."""
        incomplete = [send for send in pending_sends if not send.done]
        if not incomplete and self._comes_soon():
            return
        while turn := self.clock.turn(until):
            if push_any(incomplete, turn, self._sock) if incomplete else self._readable.poll(milliseconds(turn)):
                return
        raise TimeoutError

    def _comes_soon(self) -> bool:
        spin_until = time.monotonic() + SPIN_SECONDS
        while time.monotonic() < spin_until:
            if self._readable.poll(0):
                return True
            os.sched_yield()  # to the peer, if it waits for this very core
        return False


def push_any(pending_sends: Sequence[PendingSend], seconds: float, reading: socket.socket | None = None) -> bool:
    """Whether a socket of `pending_sends` took more, or `reading` has something, within `seconds`.

    LinkClosed where one of them is closed, at either end.
    """
    ready = select.poll()
    by_file = {send.sock.fileno(): send for send in pending_sends}
    if -1 in by_file:  # another thread has closed its link
        raise closed_here(by_file[-1].sender.source, by_file[-1].sender.target)
    for file in by_file:
        ready.register(file, select.POLLOUT)
    if reading is not None:
        ready.register(reading, select.POLLIN)
    events = ready.poll(milliseconds(seconds))
    for file, _ in events:
        if file in by_file:
            by_file[file].push()
    return bool(events)


def push_all(pending_sends: Sequence[PendingSend]) -> None:
    """Send the rest of every frame; LinkTimeout names a rank that does not take its own."""
    clock = AwakeClock()
    until = clock() + max(send.sender.deadline for send in pending_sends)
    while incomplete := [send for send in pending_sends if not send.done]:
        turn = clock.turn(until)
        if not turn:
            late = incomplete[0].sender
            raise nothing_taken(late.source, late.target, late.deadline)
        push_any(incomplete, turn)
