"""`ChunkFetcher`: fetches the chunks of weights that a node lacks, several at a time, each from the node that the
coordinator names."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tllm.cluster.certificates import COORDINATOR, Identity
from tllm.cluster.channel import Channel
from tllm.cluster.connection import Address
from tllm.cluster.join import knock
from tllm.cluster.messages import RankAddress, ToFetcher
from tllm.cluster.tls import member_client
from tllm.cluster.weight_messages import (
    Bytes,
    ChunkFound,
    ChunkReceived,
    GetChunk,
    HoldsChunks,
    LocateChunk,
    OpenChunkConnection,
    ReadBytes,
    Why,
)
from tllm.core.errors import AuthError, ClusterError, TllmError, WeightsError
from tllm.core.tasks import background, end_tasks
from tllm.engine.page_store.page_folder import PageFolder
from tllm.node.weights.chunk_server import MESSAGE_BYTES, ChunkServer, has_hash, receive_bytes
from tllm.node.weights.control_loop import ControlLoop
from tllm.node.weights.model_folder import ModelFolder, checked_bytes
from tllm.weights.chunk_cache import ChunkCache
from tllm.weights.file_chunks import FileChunk, bounds, chunk_bytes

log = logging.getLogger("tllm.node")

T = TypeVar("T")

READ_SECONDS = 60.0
LOCATE_SECONDS = 30.0
CONNECT_SECONDS = 10.0
CHUNK_SECONDS = 20.0
"""For each message of a chunk."""

ATTEMPTS, RETRY_SECONDS = 3, 0.5
"""A connection that breaks is opened anew so often, each time after a pause, before its chunk server is given up."""

AHEAD = 3
"""Chunks that are on their way while one is used: their requests and answers cost no time then."""


class ChunkConnections:
    """Connections to the chunk servers of other nodes, and to the coordinator's, one for each."""

    def __init__(self, coordinator: Address, identity: Identity) -> None:
        self.coordinator, self._context = coordinator, member_client(identity)
        self._open: dict[str, tuple[Channel, asyncio.Task[None]]] = {}
        self._opening = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def to(self, found: ChunkFound) -> Channel:
        """The connection to whoever has a chunk, opened if it is not, or is no more."""
        async with self._opening[found.node]:  # one that does not answer is in no other's way
            channel, reading = self._open.get(found.node, (None, None))
            if channel is not None and reading is not None and not reading.done():
                return channel
            where = self.coordinator if found.node == COORDINATOR else (found.host, found.port)
            limit = 2 * MESSAGE_BYTES
            channel = await knock(where, self._context, found.node, ToFetcher, limit, CONNECT_SECONDS)
            try:
                await channel.send(OpenChunkConnection())
            except BaseException:  # also where it is wanted no more
                channel.abort()
                raise
            self._open[found.node] = (channel, asyncio.create_task(_read(channel)))
            return channel

    async def close(self) -> None:
        """Close what is open; a coordinator that was lost may be back at another address."""
        while self._open:
            channel, reading = self._open.popitem()[1]
            channel.abort()
            await reading


class ChunkFetcher:
    """A node's `Fetch`. Of its methods the main thread calls `expect`, `chunk`, `found` and the object itself, the
    control thread all others.

    Chunks that came and have the right hash go to the cache and can be passed on by `server`. Wrong bytes are never
    used, and whoever gave them is reported to the coordinator, which then names another node.
    """

    def __init__(self, coordinator: Address, identity: Identity, cache: ChunkCache, server: ChunkServer) -> None:
        self.epoch = 0  # of what the main thread loads for
        self._node = identity.name
        self.cache, self._server = cache, server
        self._connections = ChunkConnections(coordinator, identity)
        self._loop = ControlLoop()
        self._control: Channel | None = None
        self._serving: asyncio.Task[None] | None = None
        self._expected: list[FileChunk] = []
        self._places: dict[FileChunk, int] = {}
        self._sizes: Mapping[str, int] = {}
        self._under_way: dict[FileChunk, asyncio.Task[tuple[bytes, str]]] = {}

    # --- the main thread
    def __call__(self, file: str, start: int, stop: int) -> bytes:
        wanted = ReadBytes(file, start, stop)
        answer: Bytes = self._wait(self._channel().ask(wanted, READ_SECONDS))
        return checked_bytes(wanted, answer)

    def expect(self, chunks: Sequence[FileChunk], sizes: Mapping[str, int]) -> None:
        self._wait(self._expect(list(chunks), sizes))

    def chunk(self, chunk: FileChunk) -> tuple[bytes, str]:
        return self._wait(self._take(chunk))

    def found(self, folder: Path) -> None:
        self._server.folder = ModelFolder(folder)
        self._wait(self._channel().send(HoldsChunks(files=True)))

    # --- any thread
    def came(self, digest: bytes, nbytes: int, source: str) -> None:
        """Tell the coordinator of a chunk that this node fetched from elsewhere, and can pass on."""
        received = ChunkReceived(digest, nbytes, source, self.cache.has(digest))
        self._loop.call(lambda: self._channel().post(received))

    @property
    def is_dropped(self) -> bool:
        """Whether what was announced by `expect` is wanted no more."""
        return not self._places

    def share_pages(self, pages: PageFolder | None) -> None:
        """Let other nodes have these pages of the KV cache."""
        self._server.pages = pages

    def with_node(self, place: RankAddress, work: Callable[[Channel], Coroutine[Any, Any, T]], seconds: float) -> T:
        """Do some work over the connection to another node's chunk server. ClusterError where that takes too long."""

        async def connected() -> T:
            async with asyncio.timeout(seconds):
                return await work(await self._connections.to(ChunkFound(b"", place.node, place.host, place.lends)))

        answer = self._loop.begin(connected())
        try:
            return answer.result(2 * seconds)
        except (TimeoutError, concurrent.futures.CancelledError) as error:
            raise ClusterError(f"{place.node} did not answer within {seconds:g} s") from error

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        answer = self._loop.begin(work)
        try:
            return answer.result()
        except concurrent.futures.CancelledError as error:
            raise ClusterError("what was to be loaded is wanted no more") from error

    # --- the control thread
    async def follow(self, control: Channel, address: Address) -> None:
        """Ask over this channel to the coordinator at `address` from now on, and tell it which chunks are here and
        passed on."""
        self._control = control
        self._loop.open()
        self._serving = self._serving or background(self._server.run(), "chunk server")
        await self._connections.close()
        self._connections.coordinator = address
        digests = tuple(await asyncio.to_thread(self.cache.digests))
        await control.send(HoldsChunks(digests, self._server.folder is not None))

    def drop(self) -> None:
        """Whatever is under way is wanted no more; the main thread, should it wait for it, is woken."""
        self._places = {}
        for task in self._under_way.values():
            task.cancel()
        self._under_way.clear()

    async def close(self) -> None:
        """End everything, passing chunks on too."""
        await self._loop.close()
        self.drop()
        await self._connections.close()
        await self.stop_serving()

    async def stop_serving(self) -> None:
        """Pass nothing on any more."""
        if self._serving is not None:
            await end_tasks(self._serving)

    def _channel(self) -> Channel:
        assert self._control is not None, "a node has a coordinator before it has a part"
        return self._control

    async def _expect(self, chunks: list[FileChunk], sizes: Mapping[str, int]) -> None:
        self.drop()
        self._expected, self._sizes = chunks, sizes
        self._places = {chunk: place for place, chunk in enumerate(chunks)}

    async def _take(self, chunk: FileChunk) -> tuple[bytes, str]:
        """A chunk, with the ones after it begun."""
        if self.is_dropped:
            raise ClusterError("what was to be loaded is wanted no more")
        place = self._places[chunk]
        for ahead in self._expected[place : place + 1 + AHEAD]:
            if ahead not in self._under_way:
                self._under_way[ahead] = asyncio.create_task(self._bring(ahead))
                self._under_way[ahead].add_done_callback(_note_failure)
        task = self._under_way[chunk]
        try:
            return await task
        finally:
            self._under_way.pop(chunk, None)

    async def _bring(self, chunk: FileChunk) -> tuple[bytes, str]:
        """A chunk and the node that gave it, "" if it was cached here. WeightsError when nobody is left to ask."""
        start, stop = bounds(chunk.number, chunk_bytes(self._sizes), self._sizes[chunk.file])
        request = LocateChunk(self.epoch, *chunk)
        while True:
            found = await self._locate(request)
            cached = await asyncio.to_thread(self.cache.take, found.digest)
            if cached is not None:
                self._channel().post(HoldsChunks((found.digest,)))
                return cached, ""
            got: bytes | Why = "lacks"
            if found.node != self._node:
                got = await self._fetch(found, GetChunk(*chunk, found.digest), stop - start)
            if isinstance(got, bytes):
                is_kept = await asyncio.to_thread(self.cache.put, found.digest, got)
                self._channel().post(ChunkReceived(found.digest, len(got), found.node, is_kept))
                return got, found.node
            request = msgspec.structs.replace(request, failed=found.node, why=got)

    async def _locate(self, wanted: LocateChunk) -> ChunkFound:
        """Who has a chunk, as the coordinator says."""
        async with aclosing(self._channel().stream(wanted, LOCATE_SECONDS)) as answers:
            async for answer in answers:
                if isinstance(answer, ChunkFound):
                    return answer
        raise ClusterError(f"the coordinator does not say who has chunk {wanted.number} of {wanted.file}")

    async def _fetch(self, found: ChunkFound, wanted: GetChunk, size: int) -> bytes | Why:
        """A chunk of the right hash from whoever has it, or why not."""
        for left in reversed(range(ATTEMPTS)):
            try:
                data = await receive_bytes(await self._connections.to(found), wanted, size, CHUNK_SECONDS)
            except WeightsError:
                return "lacks"
            except (ClusterError, AuthError) as error:
                log.warning("no weights from %s: %s", found.node, error.message)
                await asyncio.sleep(RETRY_SECONDS if left else 0)
                continue
            if await asyncio.to_thread(has_hash, data, found.digest):
                return data
            log.error("%s gave wrong bytes of %s, which are not used", found.node, wanted.file)
            return "lied"
        return "broke"


async def _read(channel: Channel) -> None:
    """Read a chunk server's answers until it closes; whoever waits for one is told by its stream's end."""
    try:
        await channel.run({})
    except TllmError as error:
        log.debug("a lender is gone: %s", error.message)
    finally:
        await channel.close()


def _note_failure(task: asyncio.Task[tuple[bytes, str]]) -> None:
    """Take note of what a chunk brought ahead failed with, should nobody ask for it any more."""
    if not task.cancelled():
        task.exception()
