"""Links over the transport of another library: gRPC in `grpc_link.py`, `torch.distributed` in `torch_link.py`.

Such a link replaces one of our own, which is encrypted and both of whose ends are authenticated. The source opens a
port of the library and sends the target, over our link, a `TransportOffer`: the port and a secret for this wire. Then
our link is closed. So who may connect, and in which epoch, is decided in one place for every kind of link.

The frames are the same as on a TCP link. At the source a thread of the library takes chunks of them from
`OutgoingFrames`; at the target one puts what it receives into `IncomingBytes`. Both are bounded: back-pressure is that
of the library's own flow control, plus DEPTH frames or chunks at each end.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from tllm.comm.links import frame
from tllm.comm.links.errors import nothing_taken
from tllm.comm.links.framed_link import FramedLink
from tllm.comm.links.handshake import LinkHello
from tllm.comm.links.link import Link
from tllm.comm.links.send_buffer import DEPTH, Buffer, FrameQueue, PendingSend
from tllm.core.errors import LinkError, decoded
from tllm.core.timing import AwakeClock, wait_awake

CHUNK_BYTES = frame.HEADER_SIZE + frame.PIECE_BYTES
"""At most so many bytes are one message of the library."""

OFFER_LIMIT = 1024
"""Bytes of an encoded offer."""

RESUMED_SECONDS = 5.0
"""How much longer a library has for a chunk that is late, in case this process stood still meanwhile."""

FOREVER = 365 * 86400.0
"""Seconds, for a library that takes no infinite timeout."""


class Transport(Protocol):
    """Another library that can move a link's frames. It replaces `ours`, an open link of our own, by a link over it.

    The two ends of a wire call their methods at the same time. `host` is the source's address, as others reach it, and
    `here` the target's. LinkError when the other end does not do its part within `seconds`.
    """

    def open_source(self, ours: Link, hello: LinkHello, host: str, seconds: float) -> Link: ...

    def open_target(self, ours: Link, hello: LinkHello, host: str, here: str, seconds: float) -> Link: ...


class TransportEndpoint(Protocol):
    """The library's part of one end of a link."""

    def finish(self, seconds: float) -> bool:
        """Whether all frames and the end of the stream reached the target within `seconds`; True at the target."""

    def stop(self) -> None:
        """End at once, and let the library's thread end; from any thread, and more than once."""


class TransportOffer(msgspec.Struct, frozen=True):
    """What the source sends the target over our link: its port, the name on its certificate and the wire's secret."""

    port: int
    name: str
    secret: bytes

    @classmethod
    def make(cls, port: int, name: str) -> TransportOffer:
        return cls(port, name, secrets.token_bytes(32))

    def send(self, ours: Link) -> None:
        """Send the offer over our link, and close that."""
        ours.send_bytes(msgspec.msgpack.encode(self))
        ours.close()

    @classmethod
    def receive(cls, ours: Link, seconds: float) -> TransportOffer:
        """Receive the offer over our link within `seconds`, and close that; FrameError for anything else."""
        ours.set_deadline(seconds)
        payload = ours.recv_bytes(OFFER_LIMIT)
        ours.close()
        return decoded(payload, _OFFERS, f"rank {ours.source} sent rank {ours.target} what is no offer")


_OFFERS = msgspec.msgpack.Decoder(TransportOffer)


class TransportLink(FramedLink):
    """One end of a link over another library's transport.

    At the source the library's thread takes chunks from `outgoing`; at the target it puts them into `incoming`.
    """

    def __init__(self, hello: LinkHello, deadline: float) -> None:
        self.outgoing = OutgoingFrames(hello.source, hello.target, deadline)
        self.incoming = IncomingBytes()
        super().__init__(self.outgoing, self.incoming, hello.source, hello.target, hello.epoch, deadline)

    def attach(self, endpoint: TransportEndpoint) -> None:
        """The library's part of this end, which `close` and `interrupt` are to end."""
        self.outgoing.endpoint = endpoint

    @property
    def is_over(self) -> bool:
        return self.outgoing.is_lost or super().is_over


class OutgoingFrames(FrameQueue):
    """The sending side: frames that wait for the library's thread."""

    def __init__(self, source: int, target: int, deadline: float) -> None:
        super().__init__(source, target, deadline)
        self.endpoint: TransportEndpoint | None = None
        self._chunk_began = math.inf  # when the thread took the chunk that it is sending
        self._handed_over: memoryview | None = None  # the last frame of which the library has all
        self._lost: LinkError | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the library has said that the target is gone."""
        return self._lost is not None

    def write(self, frame: bytes) -> None:
        with self._changed:  # an unbounded link has no full queue by which to notice that the library is late
            if not wait_awake(self._changed, lambda: not self._is_late or self._over(), RESUMED_SECONDS):
                self.fail(nothing_taken(self.source, self.target, self.deadline))
        super().write(frame)

    @property
    def _is_late(self) -> bool:
        return bool(self._waiting) and time.monotonic() - self._chunk_began > self.deadline

    def chunks(self) -> Iterator[memoryview]:
        """For the library's thread: the frames in chunks of at most CHUNK_BYTES, until the queue ends."""
        for whole in self.frames():
            for start in range(0, len(whole), CHUNK_BYTES):
                self._chunk_began = time.monotonic()
                if start + CHUNK_BYTES >= len(whole):
                    self._handed_over = whole
                yield whole[start : start + CHUNK_BYTES]
                self._chunk_began = math.inf

    def mark_lost(self, error: LinkError) -> None:
        """From the library: the target is gone, and each later `write` raises `error`.

        `close` raises it too if a frame still waits. A frame that the library has in full does not count as waiting,
        though its thread may not have come back for the next.
        """
        with self._changed:
            if any(frame is not self._handed_over for frame in self._waiting):
                self.fail(error)
            self._lost = error
            self._changed.notify_all()

    def finish(self, seconds: float) -> bool:
        super().interrupt()  # `chunks` ends: all frames have been taken
        return self.endpoint is None or self.endpoint.finish(seconds)

    def interrupt(self) -> None:
        super().interrupt()
        if self.endpoint is not None:
            self.endpoint.stop()

    def _check(self) -> None:
        super()._check()
        if self._lost is not None:
            raise self._lost

    def _over(self) -> bool:
        return super()._over() or self._lost is not None


class IncomingBytes:
    """The receiving side, a `ByteReceiver`: chunks that the library's thread brings; DEPTH may wait to be read."""

    authentic = False

    def __init__(self) -> None:
        self.clock = AwakeClock()
        self._changed = threading.Condition()
        self._chunks: deque[memoryview] = deque()
        self._end = ""

    def put(self, chunk: Buffer) -> bool:
        """From the library's thread: one more chunk, as soon as there is room; False when no more is wanted."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._chunks) < DEPTH or self._end)
            if not self._end and len(chunk):
                self._chunks.append(memoryview(chunk))
                self._changed.notify_all()
            return not self._end

    def end(self, why: str) -> None:
        """No more comes, and this is why; the first reason stays."""
        with self._changed:
            self._end = self._end or why
            self._changed.notify_all()

    def read(self, memory: memoryview, least: int, until: float, pending_sends: Sequence[PendingSend] = ()) -> int:
        """Read from `least` bytes up to all of `memory`, before `until` by `clock`; returns how many.

        TimeoutError, or OSError at the end.
        """
        assert not pending_sends, "the links of a group are all of one kind, and this kind leaves nothing to push"
        start, size = 0, len(memory)
        while start < least:
            chunk = self._first_chunk(until)
            count = min(len(chunk), size - start)
            memory[start : start + count] = chunk[:count]
            start += count
            self._consume(count)
        return start

    def wait(self, seconds: float) -> bool:
        """Whether bytes, or the end, are there to read within `seconds`."""
        with self._changed:
            return self._await(seconds)

    @property
    def is_over(self) -> bool:
        """Whether no more comes; what came may still be read."""
        return bool(self._end)

    def close(self) -> None:
        self.end("closed")
        with self._changed:
            self._chunks.clear()

    def _first_chunk(self, until: float) -> memoryview:
        with self._changed:
            if not self._await(until - self.clock()):
                raise TimeoutError
            if not self._chunks:
                raise ConnectionError(self._end)
            return self._chunks[0]

    def _consume(self, count: int) -> None:
        """The first `count` bytes of the first chunk are read."""
        with self._changed:
            if self._chunks:  # unless closed meanwhile
                rest = self._chunks[0][count:]
                if rest:
                    self._chunks[0] = rest
                else:
                    self._chunks.popleft()
                    self._changed.notify_all()

    def _await(self, seconds: float) -> bool:
        return wait_awake(self._changed, lambda: self._chunks or self._end, seconds)
