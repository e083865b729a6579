"""Links whose frames another library carries: gRPC in `grpc_link.py`, `torch.distributed` in `torch_link.py`.

Such a link is made from one of ours. The source opens a port of the library's kind and tells the target by our link,
which is encrypted and whose two ends have proved themselves, where it is and a secret that is good for this wire; so
who may come, to which epoch, is decided in one place for every kind. Then our link closes and the other goes on.

At each end the library moves runs of bytes in a thread of its own, between `Posted` and `Arrived`.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from tllm.comm.links import frame
from tllm.comm.links.errors import nothing_taken
from tllm.comm.links.framed_link import FramedLink
from tllm.comm.links.handshake import LinkHello
from tllm.comm.links.link import Link
from tllm.comm.links.send_buffer import DEPTH, Buffer, FrameQueue, Unsent
from tllm.core.errors import UNREADABLE, FrameError, LinkError

RUN_BYTES = frame.HEADER_SIZE + frame.PIECE_BYTES  # of one message of the library
OFFER_LIMIT = 1024  # bytes
FOREVER = 365 * 86400.0  # seconds, for a library that knows no infinity


class Carry(Protocol):
    """One kind of carried link: both ends of a wire call theirs at the same time, with our link of this wire.

    `host` is the source's, as others reach it. LinkError when the other end does not do its part within `seconds`.
    """

    def source(self, ours: Link, hello: LinkHello, host: str, seconds: float) -> Link: ...

    def target(self, ours: Link, hello: LinkHello, host: str, here: str, seconds: float) -> Link: ...


class Carrier(Protocol):
    """What a library does at one end."""

    def finish(self, seconds: float) -> bool:
        """Whether all that was handed over, and the end after it, reached the target in time; True at the target."""

    def stop(self) -> None:
        """End at once, and let its thread end; from any thread, more than once."""


class CarrierOffer(msgspec.Struct, frozen=True):
    """What the source tells the target by our link: its port, the name on its certificate and the wire's secret."""

    port: int
    name: str
    secret: bytes

    @classmethod
    def make(cls, port: int, name: str) -> CarrierOffer:
        return cls(port, name, secrets.token_bytes(32))

    def tell(self, ours: Link) -> None:
        ours.send_bytes(msgspec.msgpack.encode(self))
        ours.close()

    @classmethod
    def hear(cls, ours: Link, seconds: float) -> CarrierOffer:
        ours.set_deadline(seconds)
        payload = ours.recv_bytes(OFFER_LIMIT)
        ours.close()
        try:
            return msgspec.msgpack.decode(payload, type=cls)
        except UNREADABLE as error:
            raise FrameError(f"rank {ours.source} sent rank {ours.target} what is no offer: {error}") from error


class CarriedLink(FramedLink):
    """One end of a link that a library carries; `posted` is what its thread takes at the source, `arrived` gets it."""

    def __init__(self, hello: LinkHello, deadline: float) -> None:
        self.posted = Posted(hello.source, hello.target, deadline)
        self.arrived = Arrived()
        super().__init__(self.posted, self.arrived, hello.source, hello.target, hello.epoch, deadline)

    def begin(self, carrier: Carrier) -> None:
        """From now on the carrier carries."""
        self.posted.carrier = carrier

    @property
    def is_over(self) -> bool:
        return self.posted.is_lost or super().is_over


class Posted(FrameQueue):
    """The half that takes frames: each waits for the library's thread."""

    def __init__(self, source: int, target: int, deadline: float) -> None:
        super().__init__(source, target, deadline)
        self.carrier: Carrier | None = None
        self._begun = math.inf  # when the thread took the run that it is at
        self._handed: memoryview | None = None  # the last frame of which the library has all
        self._lost: LinkError | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the library has said that the target is gone."""
        return self._lost is not None

    def write(self, frame: bytes) -> None:
        with self._changed:
            late = self._waiting and time.monotonic() - self._begun > self.deadline
        if late:  # which an unbounded link would never notice by its depth
            self.fail(nothing_taken(self.source, self.target, self.deadline))
        super().write(frame)

    def start(self, parts: Iterable[Buffer]) -> Unsent | None:
        """As `write`, of frames in parts: they are copied, and nothing is left to push."""
        self.write(b"".join(parts))
        return None

    def runs(self) -> Iterator[memoryview]:
        """For the thread: the frames in runs of at most RUN_BYTES, until the end."""
        for one in self.frames():
            for start in range(0, len(one), RUN_BYTES):
                self._begun = time.monotonic()
                if start + RUN_BYTES >= len(one):
                    self._handed = one
                yield one[start : start + RUN_BYTES]
                self._begun = math.inf

    def lose(self, error: LinkError) -> None:
        """From the library: the target is gone. Whoever writes is told; closing is well if nothing waits.

        What the library has does not wait, though its thread may not have come back for more.
        """
        with self._changed:
            if any(frame is not self._handed for frame in self._waiting):
                self.fail(error)
            self._lost = error
            self._changed.notify_all()

    def finish(self, seconds: float) -> bool:
        super().interrupt()  # `runs` ends, and all has been taken
        return self.carrier is None or self.carrier.finish(seconds)

    def interrupt(self) -> None:
        super().interrupt()
        if self.carrier is not None:
            self.carrier.stop()

    def _check(self) -> None:
        super()._check()
        if self._lost is not None:
            raise self._lost

    def _over(self) -> bool:
        return super()._over() or self._lost is not None


class Arrived:
    """The half that gives bytes, as `Inbox` does, from runs that the library's thread brings; DEPTH may wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs: deque[memoryview] = deque()
        self._end = ""

    def put(self, run: Buffer) -> bool:
        """From the thread: one more run, when there is room; False when no more is wanted."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._runs) < DEPTH or self._end)
            if not self._end and len(run):
                self._runs.append(memoryview(run))
                self._changed.notify_all()
            return not self._end

    def end(self, why: str) -> None:
        """No more comes, and why; the first reason stays."""
        with self._changed:
            self._end = self._end or why
            self._changed.notify_all()

    def read(self, memory: frame.Memory | bytearray, size: int, until: float, meanwhile: Sequence[Unsent] = ()) -> None:
        """Fill `memory`, of `size` bytes, before the monotonic time `until`. TimeoutError, OSError as `Inbox`."""
        assert not meanwhile, "the links of a group are all of one kind, and this kind leaves nothing to push"
        whole, start = memoryview(memory).cast("B"), 0
        while start < size:
            run = self._next(until)
            taken = min(len(run), size - start)
            whole[start : start + taken] = run[:taken]
            start += taken
            self._take(taken)

    def wait(self, seconds: float) -> bool:
        """Whether something, or the end, is there within `seconds`."""
        with self._changed:
            return self._await(seconds)

    @property
    def is_over(self) -> bool:
        """Whether no more comes; what came may still be read."""
        return bool(self._end)

    def close(self) -> None:
        self.end("closed")
        with self._changed:
            self._runs.clear()

    def _next(self, until: float) -> memoryview:
        with self._changed:
            if not self._await(until - time.monotonic()):
                raise TimeoutError
            if not self._runs:
                raise ConnectionError(self._end)
            return self._runs[0]

    def _take(self, count: int) -> None:
        """The first `count` bytes of the first run are read."""
        with self._changed:
            if self._runs:  # unless closed meanwhile
                left = self._runs[0][count:]
                if left:
                    self._runs[0] = left
                else:
                    self._runs.popleft()
                    self._changed.notify_all()

    def _await(self, seconds: float) -> bool:
        ready: Callable[[], bool] = lambda: bool(self._runs or self._end)  # noqa: E731
        return self._changed.wait_for(ready, None if math.isinf(seconds) else max(seconds, 0.0))
