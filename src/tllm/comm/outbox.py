"""The sending side of a socket: what it takes leaves at once, the rest waits for a thread or for `Unsent.push`."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator

from tllm.comm.faults import nothing_taken, target_gone
from tllm.comm.waiting import Waiting
from tllm.ground.errors import LinkError

INLINE_BYTES = 64 * 1024  # longer frames go to the thread at once, while their sender goes on

Buffer = bytes | memoryview


class Outbox(Waiting):
    """Writes whole frames to one socket in order; what the socket takes at once needs no thread."""

    def __init__(self, sock: socket.socket, source: int, target: int, deadline: float) -> None:
        super().__init__(source, target, deadline)
        self._sock = sock
        self._thread: threading.Thread | None = None
        self._started: Unsent | None = None
        sock.setblocking(False)

    def write(self, frame: bytes) -> None:
        """Send `frame`, or leave it with the thread."""
        with self._changed:
            self._check()
            left = memoryview(frame)
            if not self._waiting and len(frame) <= INLINE_BYTES:
                left = left[self._push(left) :]
            if left:
                self._leave(left)

    def start(self, parts: Iterable[Buffer]) -> Unsent | None:
        """Send frames as far as the socket takes them; the rest is the caller's to push before it sends another.

        Nothing is copied, and each part is asked for when it is its turn: they must stay as they are until then.
        """
        with self._changed:
            self._check()
            if self._waiting:
                self._leave(memoryview(b"".join(parts)))
                return None
        self._started = unsent = Unsent(self, self._sock, iter(parts))
        unsent.push()
        return None if unsent.done else unsent

    def abandon(self) -> None:
        """End at once; freeing the socket is left to its `Inbox`."""
        self.interrupt()
        if self._thread is not None:
            self._thread.join()

    def interrupt(self) -> None:
        super().interrupt()
        shut(self._sock)

    def _check(self) -> None:
        assert self._started is None or self._started.done, "a frame that was started must be pushed to its end first"
        super()._check()

    def _push(self, frame: memoryview) -> int:
        """Bytes that the socket took without waiting; after 0 a TLS socket wants the same bytes again."""
        try:
            return self._sock.send(frame)
        except (BlockingIOError, ssl.SSLWantWriteError):
            return 0
        except OSError as error:
            self._failure = target_gone(self.source, self.target, str(error))
            raise self._failure from error

    def _leave(self, frame: memoryview) -> None:
        if self._thread is None:
            name = f"link {self.source}>{self.target}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        super()._leave(frame)

    def _run(self) -> None:
        for frame in self.frames():
            failure = self._write_all(frame)
            if failure is not None:
                self.fail(failure)

    def _write_all(self, frame: memoryview) -> LinkError | None:
        until = time.monotonic() + self.deadline
        writable = select.poll()
        try:
            writable.register(self._sock, select.POLLOUT)
            while frame:
                try:
                    frame = frame[self._sock.send(frame) :]
                except (BlockingIOError, ssl.SSLWantWriteError):
                    left = until - time.monotonic()
                    if left <= 0 or not writable.poll(None if math.isinf(left) else math.ceil(left * 1000)):
                        return nothing_taken(self.source, self.target, self.deadline)
        except (OSError, ValueError) as error:  # ValueError: closed meanwhile
            return target_gone(self.source, self.target, str(error))
        return None


class Unsent:
    """Frames that are on their way: whoever started it pushes until it is `done`, or abandons the link."""

    def __init__(self, outbox: Outbox, sock: socket.socket, parts: Iterator[Buffer]) -> None:
        self.outbox = outbox
        self.sock = sock
        self._parts = parts
        self._left = memoryview(next(parts))

    @property
    def done(self) -> bool:
        return not self._left

    def push(self) -> None:
        """Send what the socket takes without waiting."""
        try:
            while self._left:
                self._left = self._left[self.sock.send(self._left) :] or memoryview(next(self._parts, b""))
        except (BlockingIOError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            raise target_gone(self.outbox.source, self.outbox.target, str(error)) from error

    def abandon(self) -> None:
        """Give up: half a frame cannot be taken back, so its link is over."""
        if not self.done:
            self.outbox.abandon()


def shut(sock: socket.socket) -> None:
    """End both directions, which wakes any thread that waits on this socket.

    Not `sock.shutdown`: on a TLS socket that drops the encryption first, and a thread still sending would go on in
    clear.
    """
    with contextlib.suppress(OSError):  # the other end was first
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
