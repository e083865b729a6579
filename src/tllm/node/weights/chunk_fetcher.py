"""`ChunkFetcher`: brings the chunks of weights that a node lacks, from whom the coordinator names, some at a time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tllm.cluster.certificates import COORDINATOR, Identity
from tllm.cluster.channel import Channel
from tllm.cluster.connection import Address, reach
from tllm.cluster.messages import (
    Bytes,
    ChunkFound,
    ChunkReceived,
    GetChunk,
    HoldsChunks,
    LocateChunk,
    OpenChunkConnection,
    ReadBytes,
    ToBorrower,
    Why,
)
from tllm.cluster.tls import member_client
from tllm.core.errors import AuthError, ClusterError, TllmError, WeightsError
from tllm.node.weights.chunk_server import LENT_BYTES, ChunkServer, borrowed, is_whole
from tllm.node.weights.model_folder import ModelFolder, checked_bytes
from tllm.weights.chunk_cache import ChunkCache
from tllm.weights.file_chunks import FileChunk, bounds, chunk_bytes

log = logging.getLogger("tllm.node")

T = TypeVar("T")

READ_SECONDS = 60.0
SEEK_SECONDS = 30.0
REACH_SECONDS = 10.0
LENT_SECONDS = 20.0  # for each message of a chunk
TRIES, AGAIN_SECONDS = 3, 0.5
"""A connection that breaks is opened anew so often before the lender is given up."""

AHEAD = 3
"""Chunks that are on their way while one is used: their questions and answers cost no time then."""


class ChunkFetcher:
    """A node's `Fetch`: the main thread calls `expect`, `chunk` and itself, the control thread everything else.

    What came and was right goes to the shelf and can be passed on; wrong bytes are never used, and whoever gave them
    is named to the coordinator, which then names another.
    """

    def __init__(self, coordinator: Address, identity: Identity, shelf: ChunkCache, lender: ChunkServer) -> None:
        self.epoch = 0  # of what the main thread loads for
        self._node = identity.name
        self._coordinator, self._context = coordinator, member_client(identity)
        self._shelf, self._lender = shelf, lender
        self._loop: asyncio.AbstractEventLoop | None = None
        self._control: Channel | None = None
        self._lending: asyncio.Task[None] | None = None
        self._lenders: dict[str, tuple[Channel, asyncio.Task[None]]] = {}
        self._opening = asyncio.Lock()
        self._expected: list[FileChunk] = []
        self._places: dict[FileChunk, int] = {}
        self._sizes: Mapping[str, int] = {}
        self._under_way: dict[FileChunk, asyncio.Task[tuple[bytes, str]]] = {}

    # --- the main thread
    def __call__(self, file: str, start: int, stop: int) -> bytes:
        wanted = ReadBytes(file, start, stop)
        answer = self._wait(self._channel().ask(wanted, READ_SECONDS))
        assert isinstance(answer, Bytes)
        return checked_bytes(wanted, answer)

    def expect(self, chunks: Sequence[FileChunk], sizes: Mapping[str, int]) -> None:
        self._wait(self._expect(list(chunks), sizes))

    def chunk(self, chunk: FileChunk) -> tuple[bytes, str]:
        return self._wait(self._take(chunk))

    def found(self, folder: Path) -> None:
        self._lender.folder = ModelFolder(folder)
        self._wait(self._channel().send(HoldsChunks(files=True)))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None, "a node has a coordinator before it has a part"
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except concurrent.futures.CancelledError as error:
            raise ClusterError("what was to be loaded is wanted no more") from error

    # --- the control thread
    async def follow(self, control: Channel) -> None:
        """From now on this is the way to the coordinator, which is told what is kept here and passed on from now on."""
        self._loop, self._control = asyncio.get_running_loop(), control
        self._lending = self._lending or asyncio.create_task(self._lender.run(), name="lender")
        await self._drop_lenders()
        await control.send(
            HoldsChunks(tuple(await asyncio.to_thread(self._shelf.digests)), self._lender.folder is not None)
        )

    def drop(self) -> None:
        """Whatever is under way is wanted no more; the main thread, should it wait for it, is woken."""
        for task in self._under_way.values():
            task.cancel()
        self._under_way.clear()

    async def close(self) -> None:
        """End everything, lending too."""
        self.drop()
        await self._drop_lenders()
        await self.stop_lending()

    async def stop_lending(self) -> None:
        """Pass nothing on any more."""
        if self._lending is not None:
            self._lending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._lending

    def _channel(self) -> Channel:
        assert self._control is not None, "a node has a coordinator before it has a part"
        return self._control

    async def _expect(self, chunks: list[FileChunk], sizes: Mapping[str, int]) -> None:
        self.drop()
        self._expected, self._sizes = chunks, sizes
        self._places = {chunk: place for place, chunk in enumerate(chunks)}

    async def _take(self, chunk: FileChunk) -> tuple[bytes, str]:
        """A chunk, with the ones after it begun."""
        place = self._places[chunk]
        for ahead in self._expected[place : place + 1 + AHEAD]:
            if ahead not in self._under_way:
                self._under_way[ahead] = asyncio.create_task(self._bring(ahead))
                self._under_way[ahead].add_done_callback(_heard)
        task = self._under_way[chunk]
        try:
            return await task
        finally:
            self._under_way.pop(chunk, None)

    async def _bring(self, chunk: FileChunk) -> tuple[bytes, str]:
        """A chunk from the shelf here, else from one lender after another; WeightsError when none is left."""
        start, stop = bounds(chunk.number, chunk_bytes(self._sizes), self._sizes[chunk.file])
        seek = LocateChunk(self.epoch, *chunk)
        while True:
            found = await self._seek(seek)
            kept = await asyncio.to_thread(self._shelf.take, found.digest)
            if kept is not None:
                self._channel().post(HoldsChunks((found.digest,)))
                return kept, ""
            got: bytes | Why = "lacks"
            if found.node != self._node:
                got = await self._borrow(found, GetChunk(*chunk, found.digest), stop - start)
            if isinstance(got, bytes):
                is_kept = await asyncio.to_thread(self._shelf.put, found.digest, got)
                self._channel().post(ChunkReceived(found.digest, len(got), found.node, is_kept))
                return got, found.node
            seek = msgspec.structs.replace(seek, failed=found.node, why=got)

    async def _seek(self, wanted: LocateChunk) -> ChunkFound:
        async for answer in self._channel().stream(wanted, SEEK_SECONDS):
            if isinstance(answer, ChunkFound):
                return answer
        raise ClusterError(f"the coordinator does not say who has chunk {wanted.number} of {wanted.file}")

    async def _borrow(self, found: ChunkFound, wanted: GetChunk, size: int) -> bytes | Why:
        """A chunk whose hash is right from one lender, or why not."""
        for left in reversed(range(TRIES)):
            try:
                data = await borrowed(await self._lender_at(found), wanted, size, LENT_SECONDS)
            except WeightsError:
                return "lacks"
            except (ClusterError, AuthError) as error:
                log.warning("no weights from %s: %s", found.node, error.message)
                await asyncio.sleep(AGAIN_SECONDS if left else 0)
                continue
            if await asyncio.to_thread(is_whole, data, found.digest):
                return data
            log.error("%s gave wrong bytes of %s, which are not used", found.node, wanted.file)
            return "lied"
        return "broke"

    async def _lender_at(self, found: ChunkFound) -> Channel:
        """The connection to a lender, opened if it is not, or is no more."""
        async with self._opening:
            channel, reading = self._lenders.get(found.node, (None, None))
            if channel is not None and reading is not None and not reading.done():
                return channel
            where = self._coordinator if found.node == COORDINATOR else (found.host, found.port)
            limit = 2 * LENT_BYTES
            channel = await reach(where, self._context, found.node, ToBorrower, limit, REACH_SECONDS)
            await channel.send(OpenChunkConnection())
            self._lenders[found.node] = (channel, asyncio.create_task(_read(channel)))
            return channel

    async def _drop_lenders(self) -> None:
        """Close what is open; a coordinator that was lost may be back at another end."""
        while self._lenders:
            channel, reading = self._lenders.popitem()[1]
            channel.abort()
            await reading


async def _read(channel: Channel) -> None:
    """Read a lender's answers until it closes; whoever waits for one is told by its stream's end."""
    try:
        await channel.run({})
    except TllmError as error:
        log.debug("a lender is gone: %s", error.message)
    finally:
        await channel.close()


def _heard(task: asyncio.Task[tuple[bytes, str]]) -> None:
    """Take note of what a chunk brought ahead failed with, should nobody ask for it any more."""
    if not task.cancelled():
        task.exception()
