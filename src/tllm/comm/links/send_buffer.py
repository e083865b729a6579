"""The sending side of links: `FrameQueue` for any transport, `SendBuffer` for a socket, `PendingSend` without a thread.

Back-pressure: a queue holds a bounded number of frames. Its next `write` waits for the thread that sends them, and
fails after the deadline with a LinkTimeout that names the rank which does not receive.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterable, Iterator

from tllm.comm.links.errors import closed_here, nothing_taken, target_gone
from tllm.core.errors import LinkError
from tllm.core.timing import AwakeClock, wait_awake

DEPTH = 16
"""Frames that may wait in a queue; the next one blocks its sender."""

DRAIN_SECONDS = 5.0
"""How long `close` lets waiting frames leave."""

INLINE_BYTES = 64 * 1024
"""A frame of up to so many bytes is written in the caller's thread; a longer one goes to the link's thread at once."""

HUNG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)  # Linux reports it before what came is read

Buffer = bytes | memoryview


class FrameQueue:
    """Frames of a link in the order in which the link's thread sends them; a full queue blocks `write`.

    `depth` is how many frames may wait, `deadline` how many seconds `write` may. An error of the thread is kept, and
    raised at the owner's next `write` or at `close`. `authentic`: the transport checks each byte itself, as TLS does.
    """

    authentic = False

    def __init__(self, source: int, target: int, deadline: float) -> None:
        self.deadline = deadline
        self.depth: float = DEPTH
        self.source, self.target = source, target
        self._lock = threading.RLock()  # of `_changed`; taken by itself it is entered without a call of Python
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[memoryview] = deque()  # the thread may be half through the first
        self._failure: LinkError | None = None
        self._closing = False

    def write(self, frame: bytes) -> None:
        """Put `frame` into the queue."""
        with self._changed:
            self._check()
            self._put(memoryview(frame))

    def start_write(self, parts: Iterable[Buffer]) -> PendingSend | None:
        """As `write`, of frames in parts, which are copied: nothing is left for the caller to push."""
        self.write(b"".join(parts))
        return None

    def frames(self) -> Iterator[memoryview]:
        """For the thread: each frame in turn, until the queue ends. To ask for the next says that the last is sent."""
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
        """From the thread: no frame can be sent any more, and this is why; the first error stays."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def close(self) -> None:
        """Let waiting frames leave, then end; raises the thread's error, or LinkTimeout if they do not leave."""
        seconds = min(self.deadline, DRAIN_SECONDS)
        with self._changed:
            drained = wait_awake(self._changed, lambda: not self._waiting or self._over(), seconds)
        drained = drained and (self._over() or self.finish(seconds))
        self.abandon()
        if self._failure is not None:
            raise self._failure
        if not drained:
            raise nothing_taken(self.source, self.target, seconds)

    def finish(self, seconds: float) -> bool:
        """After the last frame was sent: whether the other end has all, for a transport that can tell."""
        return True

    def abandon(self) -> None:
        """End at once, for an owner that already knows what failed."""
        self.interrupt()

    def interrupt(self) -> None:
        """Send nothing more, and wake whoever waits; from any thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise closed_here(self.source, self.target)

    def _put(self, frame: memoryview) -> None:
        """Queue a frame, waiting for room; the lock is held."""
        if not wait_awake(self._changed, lambda: len(self._waiting) < self.depth or self._over(), self.deadline):
            self._failure = nothing_taken(self.source, self.target, self.deadline)
        self._check()
        self._waiting.append(frame)
        self._changed.notify_all()

    def _over(self) -> bool:
        return self._closing or self._failure is not None


class SendBuffer(FrameQueue):
    """Writes frames to one non-blocking socket, in order.

    What the socket takes at once leaves in the caller's thread. The rest goes to a thread of the link's own, which
    begins when it is first needed, or is the caller's `PendingSend`.
    """

    def __init__(self, sock: socket.socket, source: int, target: int, deadline: float) -> None:
        super().__init__(source, target, deadline)
        self.authentic = is_authentic(sock)
        self._sock = sock
        self._thread: threading.Thread | None = None
        self._pending: PendingSend | None = None
        sock.setblocking(False)

    def write(self, frame: bytes) -> None:
        """Send `frame`, or leave what the socket does not take now to the thread."""
        with self._lock:
            self._check()
            if self._waiting or len(frame) > INLINE_BYTES:
                self._put(memoryview(frame))
                return
            try:
                sent = self._sock.send(frame)
            except (BlockingIOError, ssl.SSLWantWriteError):  # and a TLS socket wants the same bytes again
                sent = 0
            except OSError as error:
                self._failure = target_gone(self.source, self.target, str(error))
                raise self._failure from error
            if sent < len(frame):
                self._put(memoryview(frame)[sent:])

    def start_write(self, parts: Iterable[Buffer]) -> PendingSend | None:
        """Send frames as far as the socket takes them; the rest is the caller's to push before it sends another.

        Nothing is copied, and each part is asked for when it is its turn: they must stay as they are until then.
        """
        with self._changed:
            self._check()
            if self._waiting:
                self._put(memoryview(b"".join(parts)))
                return None
        self._pending = pending = PendingSend(self, self._sock, iter(parts))
        pending.push()
        return None if pending.done else pending

    def abandon(self) -> None:
        """End at once; the `ReceiveBuffer` of the same socket closes it."""
        self.interrupt()
        if self._thread is not None:
            self._thread.join()

    def interrupt(self) -> None:
        super().interrupt()
        shut(self._sock)

    def _check(self) -> None:
        assert self._pending is None or self._pending.done, "a frame that was started must be pushed to its end first"
        super()._check()

    def _put(self, frame: memoryview) -> None:
        if has_hung_up(self._sock):  # else the frame would wait for a thread that is still to find out
            self._failure = self._failure or target_gone(self.source, self.target, "connection closed")
            raise self._failure
        if self._thread is None:
            name = f"link {self.source}>{self.target}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        super()._put(frame)

    def _run(self) -> None:
        for frame in self.frames():
            failure = self._write_all(frame)
            if failure is not None:
                self.fail(failure)

    def _write_all(self, frame: memoryview) -> LinkError | None:
        clock = AwakeClock()
        until = clock() + self.deadline
        writable = select.poll()
        try:
            writable.register(self._sock, select.POLLOUT)
            while frame:
                try:
                    frame = frame[self._sock.send(frame) :]
                except (BlockingIOError, ssl.SSLWantWriteError):
                    turn = clock.turn(until)
                    if not turn:
                        return nothing_taken(self.source, self.target, self.deadline)
                    writable.poll(milliseconds(turn))
        except (OSError, ValueError) as error:  # ValueError: closed meanwhile
            return target_gone(self.source, self.target, str(error))
        return None


class PendingSend:
    """A non-blocking send, as MPI_Isend: whoever started it pushes until it is `done`, or abandons the link.

    `sender` is the send buffer of the link; `parts` are the frames' headers and payloads, in order.
    """

    def __init__(self, sender: SendBuffer, sock: socket.socket, parts: Iterator[Buffer]) -> None:
        self.sender = sender
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
            raise target_gone(self.sender.source, self.sender.target, str(error)) from error

    def abandon(self) -> None:
        """Give up: a frame of which a part is sent cannot be taken back, so its link ends."""
        if not self.done:
            self.sender.abandon()


def is_authentic(sock: socket.socket) -> bool:
    """Whether what is read from this socket is what the other end wrote, by more than TCP's 16 bits: TLS ends the
    connection at the first record whose tag is wrong."""
    return isinstance(sock, ssl.SSLSocket)


def has_hung_up(sock: socket.socket) -> bool:
    """Whether the other end has closed this connection, or this one; what came before may still be unread."""
    hung_up = select.poll()
    try:
        hung_up.register(sock, HUNG_UP)
    except ValueError:  # closed here
        return True
    return bool(hung_up.poll(0))


def milliseconds(seconds: float) -> int | None:
    """As `poll` wants it: rounded up, None for ever."""
    return None if math.isinf(seconds) else math.ceil(seconds * 1000)


def shut(sock: socket.socket) -> None:
    """End both directions of a connection, which wakes any thread that waits on this socket.

    Not by `sock.shutdown`: on a TLS socket that drops the encryption first, and a thread that is still sending would go
    on in clear text.
    """
    with contextlib.suppress(OSError):  # the other end was first
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
