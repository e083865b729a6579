"""`FrameQueue`: whole frames that wait for the thread which writes them, in order; and what it failed with, if it did.

The sending side of a socket: what it takes leaves at once, the rest waits for a thread or for `Unsent.push`.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator

from tllm.comm.links.errors import closed_here, nothing_taken, target_gone
from tllm.core.errors import LinkError

DEPTH = 16  # frames that may wait; the next one blocks its sender
DRAIN_SECONDS = 5.0  # how long close() lets waiting frames leave


class FrameQueue:
    """The sending side of a link; blocks its owner only when `depth` frames wait already.

    What fails in the thread is kept and raised to the owner at its next `write` or at `close`.
    """

    def __init__(self, source: int, target: int, deadline: float) -> None:
        self.deadline = deadline
        self.depth: float = DEPTH
        self.source, self.target = source, target
        self._changed = threading.Condition()
        self._waiting: deque[memoryview] = deque()  # the thread may be half through the first
        self._failure: LinkError | None = None
        self._closing = False

    def write(self, frame: bytes) -> None:
        """Leave `frame` with the thread."""
        with self._changed:
            self._check()
            self._leave(memoryview(frame))

    def frames(self) -> Iterator[memoryview]:
        """For the thread: each frame when it is its turn, until the end. Whoever asks for the next has written one."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._over())
                if self._over():
                    return
                frame = self._waiting[0]
            yield frame
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()

    def fail(self, error: LinkError) -> None:
        """From the thread: no frame can be written any more."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def close(self) -> None:
        """Let waiting frames leave, then end; raises what the thread failed with."""
        seconds = min(self.deadline, DRAIN_SECONDS)
        with self._changed:
            drained = self._changed.wait_for(lambda: not self._waiting or self._over(), seconds)
        drained = drained and (self._over() or self.finish(seconds))
        self.abandon()
        if self._failure is not None:
            raise self._failure
        if not drained:
            raise nothing_taken(self.source, self.target, seconds)

    def finish(self, seconds: float) -> bool:
        """Every frame is written: whether the other end has them by then, where writing alone does not say so."""
        return True

    def abandon(self) -> None:
        """End at once, for an owner that knows already what failed."""
        self.interrupt()

    def interrupt(self) -> None:
        """Let nothing more leave, and wake whoever waits; from any thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise closed_here(self.source, self.target)

    def _leave(self, frame: memoryview) -> None:
        """Hand a frame to the thread, waiting for room; the lock is held."""
        limit = None if math.isinf(self.deadline) else self.deadline
        if not self._changed.wait_for(lambda: len(self._waiting) < self.depth or self._over(), limit):
            self._failure = nothing_taken(self.source, self.target, self.deadline)
        self._check()
        self._waiting.append(frame)
        self._changed.notify_all()

    def _over(self) -> bool:
        return self._closing or self._failure is not None


INLINE_BYTES = 64 * 1024  # longer frames go to the thread at once, while their sender goes on

Buffer = bytes | memoryview


class SendBuffer(FrameQueue):
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

    def __init__(self, outbox: SendBuffer, sock: socket.socket, parts: Iterator[Buffer]) -> None:
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
