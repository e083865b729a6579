"""`StoredStreams`: the replies that may be taken up again, each with what was asked and the engine's outputs so far.

It only remembers: nothing here runs, waits or reads a clock of its own. Whoever runs the requests reports what happens
(`opened`, `delivered`, `closed`), so that the same can be fed from elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from tllm.core.errors import RequestError, TllmError
from tllm.spec.request import Output, StreamRecord

_encode = msgspec.msgpack.Encoder().encode


@dataclass(eq=False)
class StoredStream:
    """One reply's outputs, in the order in which they came, of all its choices.

    `running` are the engine's requests that have not ended. With an `error` all have. `readers` counts who follows it.
    """

    record: StreamRecord
    running: set[str]
    nbytes: int
    outputs: list[Output] = field(default_factory=list)
    error: TllmError | None = None
    ended: float = 0.0
    readers: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        return not self.running

    async def wait(self, place: int) -> None:
        """Until there is an output of that number, or it is over."""
        while len(self.outputs) <= place and not self.is_over:
            await self._news.wait()

    def tell(self) -> None:
        """Wake those that wait."""
        self._news.set()
        self._news = asyncio.Event()


class StoredStreams:
    """Streams by their ids, for `seconds` after their end and within `max_bytes` together.

    Where they would be more, those that have ended go first, the oldest before the others, then those that run and
    that nobody reads, and last the one that grew: its readers go on reading, and it cannot be taken up any more.
    `dropped` is called with each that goes before it has ended.
    """

    def __init__(
        self,
        seconds: float,
        max_bytes: int,
        dropped: Callable[[StoredStream], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.nbytes = 0
        self._seconds, self._max_bytes = seconds, max_bytes
        self._dropped, self._clock = dropped, clock
        self._streams: dict[str, StoredStream] = {}

    def opened(self, record: StreamRecord, requests: Iterable[str]) -> StoredStream:
        """A stream begins, whose engine's requests are called so. RequestError where another one is called like it."""
        self.expire()
        if record.id in self._streams:
            raise RequestError(f"there is a reply {record.id[:100]!r} already", "give each its own id")
        stream = StoredStream(record, set(requests), len(_encode(record)))
        self._streams[record.id] = stream
        self.nbytes += stream.nbytes
        self._make_room(stream)
        return stream

    def delivered(self, stream: StoredStream, output: Output) -> None:
        """The engine gave more of it."""
        stream.outputs.append(output)
        if self.is_kept(stream):
            size = len(_encode(output))
            stream.nbytes += size
            self.nbytes += size
            self._make_room(stream)
        stream.tell()

    def closed(self, stream: StoredStream, request_id: str, error: TllmError | None = None) -> None:
        """One of its requests has ended, or with an error all of them."""
        if request_id not in stream.running:
            return
        stream.running.discard(request_id)
        if error is not None:
            stream.running.clear()
            stream.error = error
        if stream.is_over:
            stream.ended = self._clock()
            stream.tell()

    def find(self, stream_id: str, owner: str) -> StoredStream | None:
        """The stream, if it is there, and that owner's."""
        self.expire()
        stream = self._streams.get(stream_id)
        return stream if stream is not None and stream.record.owner == owner else None

    def is_kept(self, stream: StoredStream) -> bool:
        """Whether it can be taken up."""
        return self._streams.get(stream.record.id) is stream

    def forget(self, stream: StoredStream) -> None:
        """Keep it no more."""
        if self.is_kept(stream):
            del self._streams[stream.record.id]
            self.nbytes -= stream.nbytes
            if not stream.is_over:
                self._dropped(stream)

    def expire(self) -> None:
        """Forget what ended long enough ago."""
        until = self._clock() - self._seconds
        for stream in [kept for kept in self._streams.values() if kept.is_over and kept.ended <= until]:
            self.forget(stream)

    def _make_room(self, grown: StoredStream) -> None:
        if self.nbytes <= self._max_bytes:
            return
        others = [stream for stream in self._streams.values() if stream is not grown]
        ended = sorted((stream for stream in others if stream.is_over), key=lambda stream: stream.ended)
        unread = [stream for stream in others if not stream.is_over and not stream.readers]
        for stream in (*ended, *unread, grown):
            if self.nbytes <= self._max_bytes:
                return
            self.forget(stream)
