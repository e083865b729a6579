"""`StoredStreams`: the replies that may be taken up again, each with what was asked and the engine's outputs so far.

It only remembers: nothing here runs, waits or reads a clock of its own. Whoever runs the requests reports what happens
(`opened`, `delivered`, `closed`), so that the same can be fed from elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tllm.core.errors import RequestError, TllmError
from tllm.server.stored.kept_bytes import kept_bytes, output_bytes
from tllm.spec.request import Output, Request, StreamRecord


@dataclass(eq=False)
class StoredStream:
    """One reply's outputs, in the order in which they came, of all its choices.

    `nbytes` is what all of it takes in memory. `running` are the engine's requests that have not ended. With an `error`
    all have. `readers` counts who follows it: they see the first `shown` outputs, which are all unless they are to be
    agreed on first. So is the stream itself, which `is_known` then. Once it `is_elsewhere`, another process goes on
    with it, and no more is shown here.
    """

    record: StreamRecord
    requests: tuple[Request, ...]
    running: set[str]
    nbytes: int
    outputs: list[Output] = field(default_factory=list)
    error: TllmError | None = None
    ended: float = 0.0
    readers: int = 0
    shown: int = 0
    is_known: bool = False
    is_elsewhere: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        return not self.running

    @property
    def is_shown(self) -> bool:
        """Whether it is over and all of it can be seen."""
        return self.is_over and self.shown == len(self.outputs)

    async def wait(self, place: int) -> None:
        """Until an output of that number can be seen, or all can, or no more will be here."""
        while self.shown <= place and not self.is_shown and not self.is_elsewhere:
            await self._news.wait()

    async def until_known(self) -> None:
        """Until it would be found whatever becomes of this process, where that is asked for."""
        while not self.is_known and not self.is_elsewhere:
            await self._news.wait()

    def show(self, count: int) -> None:
        """Let readers see so many outputs."""
        self.is_known, self.shown = True, count
        self.tell()

    def tell(self) -> None:
        """Wake those that wait."""
        self._news.set()
        self._news = asyncio.Event()


class StoredStreams:
    """Streams by their ids, for `seconds` after their end and within `max_bytes` together.

    Where they would be more, those that have ended go first, the oldest before the others, then those that run and
    that nobody reads, and last the one that grew: its readers go on reading, and it cannot be taken up any more.
    `dropped` is called with each that goes before it has ended. Where `on_change` is set, it is told of every change,
    and whoever set it shows the outputs; else readers see them at once.
    """

    on_change: Callable[[StoredStream], None] | None = None

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

    def opened(self, record: StreamRecord, requests: Sequence[Request]) -> StoredStream:
        """A stream begins, with these requests of the engine. RequestError where another one is called like it."""
        self.expire()
        if record.id in self._streams:
            raise RequestError(f"there is a reply {record.id[:100]!r} already", "give each its own id")
        size = kept_bytes((record, tuple(requests)))
        stream = StoredStream(record, tuple(requests), {request.id for request in requests}, size)
        self._streams[record.id] = stream
        self.nbytes += stream.nbytes
        self._make_room(stream)
        self._changed(stream)
        return stream

    def delivered(self, stream: StoredStream, output: Output) -> None:
        """The engine gave more of it."""
        stream.outputs.append(output)
        if self.is_kept(stream):
            size = output_bytes(output)
            stream.nbytes += size
            self.nbytes += size
            self._make_room(stream)
        self._changed(stream)

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
            self._changed(stream)

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
            self._changed(stream)
            if not stream.is_over:
                self._dropped(stream)

    def expire(self) -> None:
        """Forget what ended long enough ago."""
        until = self._clock() - self._seconds
        for stream in [kept for kept in self._streams.values() if kept.is_over and kept.ended <= until]:
            self.forget(stream)

    def kept(self) -> list[StoredStream]:
        """All that can be taken up."""
        return list(self._streams.values())

    def _changed(self, stream: StoredStream) -> None:
        """Tell whoever wants to know. What is kept no more is agreed on by nobody: those who read it see all."""
        if self.on_change is None or not self.is_kept(stream):
            stream.show(len(stream.outputs))
        if self.on_change is not None:
            self.on_change(stream)

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
