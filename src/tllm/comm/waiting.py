"""`Waiting`: whole frames that wait for the thread which writes them, in order; and what it failed with, if it did."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator

from tllm.comm.faults import closed_here, nothing_taken
from tllm.ground.errors import LinkError

DEPTH = 16  # frames that may wait; the next one blocks its sender
DRAIN_SECONDS = 5.0  # how long close() lets waiting frames leave


class Waiting:
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
