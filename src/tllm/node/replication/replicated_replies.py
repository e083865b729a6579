"""`ReplicatedReplies`: keeps replies that clients can resume on the replicas of the coordinator's state.

A reader sees an output only after the replicas have agreed on it. So a new coordinator has everything that any reader
has seen, and continues each reply byte for byte as it would have gone on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping

import msgspec

from tllm.cluster.consensus.replicated_state import AnyEntry, ReplyForgotten, ReplyGrown, ReplyOpened
from tllm.server.stored.stored_streams import StoredStream, StoredStreams
from tllm.spec.request import KeptReply, Output

log = logging.getLogger("tllm.node")

REPLIES_BYTES = 16 * 1024 * 1024
"""Of all replies that are replicated: half of the longest snapshot of the state. Others end with the first machine."""

ENTRY_BYTES = 1024 * 1024
"""An entry stops after the output that makes it longer; a reply that begins with more is not replicated."""

_encode = msgspec.msgpack.Encoder().encode


class ReplicatedReplies:
    """`propose` agrees on an entry with the other replicas. Nothing is replicated before `keep` names the streams."""

    def __init__(self, propose: Callable[[AnyEntry], Awaitable[None]]) -> None:
        self._propose = propose
        self._streams: StoredStreams | None = None
        self._agreed: dict[str, int] = {}  # of each reply that the replicas have, so many outputs
        self._sizes: dict[str, int] = {}  # of the same, the bytes that they are when encoded
        self._taken = 0  # and their sum
        self._ended: set[str] = set()  # of these, the ones whose end is agreed on
        self._left_out: set[str] = set()
        self._news = asyncio.Event()

    def keep(self, streams: StoredStreams, known: Mapping[str, KeptReply]) -> None:
        """Replicate these from now on. `known` is what the replicas have."""
        self._agreed = {name: len(reply.outputs) for name, reply in known.items()}
        self._sizes = {name: len(_encode(reply)) for name, reply in known.items()}
        self._taken = sum(self._sizes.values())
        self._ended = {name for name, reply in known.items() if reply.is_over}
        self._streams = streams
        streams.on_change = lambda stream: self._news.set()
        self._news.set()

    async def run(self) -> None:
        """Agree on what changes, until `propose` raises: then no reader sees more than was agreed on."""
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                for entry in self._changes():
                    await self._propose(entry)
        finally:
            if self._streams is not None:
                self._streams.on_change = _nothing

    def _changes(self) -> Iterator[AnyEntry]:
        """The entries that bring the replicas up to date. Each has been agreed on when the next is asked for."""
        assert self._streams is not None
        kept = {stream.record.id: stream for stream in self._streams.kept()}
        self._left_out &= kept.keys()
        for name in self._agreed.keys() - kept.keys():
            yield ReplyForgotten(name)
            self._forget(name)
        for name, stream in kept.items():
            if name not in self._agreed and name not in self._left_out:
                yield from self._open(stream)
            if name in self._agreed and self._has_news(stream):
                yield from self._grow(stream)
            if name in self._left_out:
                stream.show(len(stream.outputs))

    def _has_news(self, stream: StoredStream) -> bool:
        name = stream.record.id
        return self._agreed[name] < len(stream.outputs) or (stream.is_over and name not in self._ended)

    def _open(self, stream: StoredStream) -> Iterator[AnyEntry]:
        name, size = stream.record.id, len(_encode((stream.record, stream.requests)))
        if why := self._why_not(name, size, ENTRY_BYTES):
            self._leave_out(stream, why)
            return
        yield ReplyOpened(stream.record, stream.requests)
        self._agreed[name], self._sizes[name] = 0, size
        self._taken += size
        stream.show(0)

    def _why_not(self, name: str, size: int, most: int) -> str:
        """Why so many more bytes of a reply are not replicated, of which one entry takes at `most` these; "" where they
        are."""
        whole = self._sizes.get(name, 0) + size
        if size > most or whole > REPLIES_BYTES:
            long, limit = (size, most) if size > most else (whole, REPLIES_BYTES)
            return f"is too long to be replicated, with {long} bytes of at most {limit}"
        if self._taken + size > REPLIES_BYTES:
            return f"has no room beside the other replies that are replicated: {self._taken} of {REPLIES_BYTES} bytes"
        return ""

    def _grow(self, stream: StoredStream) -> Iterator[AnyEntry]:
        name, start = stream.record.id, self._agreed[stream.record.id]
        outputs, size = list[Output](), 0
        for output in stream.outputs[start:]:
            outputs.append(output)
            size += len(_encode(output))
            if size > ENTRY_BYTES:
                break
        if why := self._why_not(name, size, 2 * ENTRY_BYTES):
            yield ReplyForgotten(name)
            self._forget(name)
            self._leave_out(stream, why)
            return
        is_over = stream.is_over and start + len(outputs) == len(stream.outputs)
        error = stream.error.message if is_over and stream.error is not None else ""
        yield ReplyGrown(name, start, tuple(outputs), is_over, error)
        self._agreed[name] = start + len(outputs)
        self._sizes[name] += size
        self._taken += size
        if is_over:
            self._ended.add(name)
        elif self._has_news(stream):
            self._news.set()  # after all others, which one that grows all the time does not keep waiting
        stream.show(self._agreed[name])

    def _forget(self, name: str) -> None:
        del self._agreed[name]
        self._taken -= self._sizes.pop(name)
        self._ended.discard(name)

    def _leave_out(self, stream: StoredStream, why: str) -> None:
        log.warning("reply %s %s; it ends if this process does", stream.record.id, why)
        self._left_out.add(stream.record.id)


def _nothing(stream: StoredStream) -> None:
    """Nobody is told, and nothing is shown."""
