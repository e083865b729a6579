"""Two ends of a control channel in memory: what one writes the other reads."""

from __future__ import annotations

import asyncio
from typing import Any

from tllm.cluster.channel import Channel
from tllm.cluster.messages import FromNode, ToNode


class Writer:
    """What one end writes into the other's reader. Closing it ends both ends' readers, as closing a socket does."""

    def __init__(self, reader: asyncio.StreamReader, own: asyncio.StreamReader) -> None:
        self._reader, self._own, self._closed = reader, own, False
        self.transport = self

    def write(self, data: bytes) -> None:
        if not self._closed and not self._reader.at_eof():
            self._reader.feed_data(data)

    async def drain(self) -> None:
        """Memory takes all."""

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._reader.feed_eof()
            self._own.feed_eof()

    abort = close

    async def wait_closed(self) -> None:
        """It is closed at once."""


def channel_pair(node: str = "lab-2") -> tuple[Channel, Channel]:
    """The node's end and the coordinator's."""
    here, there = asyncio.StreamReader(), asyncio.StreamReader()
    writers: Any = (Writer(there, here), Writer(here, there))
    return Channel(here, writers[0], "coordinator", ToNode), Channel(there, writers[1], node, FromNode)
