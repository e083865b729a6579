"""`ChunkServer`: sends chunks of weights to other nodes, over connections that carry nothing else.

Connections are mutual TLS, as on the data wire: only nodes of this cluster may ask, and only for chunks by their hash.
Pages of the KV cache are given as the files that they are: only those of the model that is served, and only those that
the folder's index lists, so no path comes from outside.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from tllm.cluster.certificates import Identity
from tllm.cluster.channel import Channel
from tllm.cluster.connection import NODES_FILES, accept_tls, listen, reason_of, serve_connections
from tllm.cluster.messages import FromFetcher, Message
from tllm.cluster.tls import data_server
from tllm.cluster.weight_messages import (
    ChunkBytes,
    FindPages,
    GetChunk,
    GetPage,
    ListHubChunks,
    ListPages,
    OpenChunkConnection,
    PageNames,
    PagesFound,
)
from tllm.core.disk import open_files
from tllm.core.errors import TllmError, WeightsError
from tllm.core.tasks import end_tasks
from tllm.engine.page_store.page_folder import Box, PageFolder
from tllm.engine.page_store.remote_pages import FILE_BYTES
from tllm.node.weights.hub_chunks import DIGEST_BYTES, HubChunks
from tllm.node.weights.model_folder import ModelFolder
from tllm.weights.chunk_cache import ChunkCache
from tllm.weights.file_chunks import FileChunk

log = logging.getLogger("tllm.node")

MESSAGE_BYTES = 256 * 1024
"""Of a chunk, in one message. Each that comes shows that the server lives, on slow links too."""

MAX_GUESTS = 64
"""Connections that have not shown a certificate yet."""

IDLE_SECONDS = 60.0
"""A node that has asked for nothing for so long gives way to another; its connection is opened anew when it asks."""

NAMES_AT_ONCE = 4096
"""Names of pages in one message."""

READS = 4
"""Chunks in memory at once, whoever asks."""

PENDING_SECONDS = 5.0
"""Whoever waits for what takes long is told so this often, and knows by it that we are here."""


async def pending(work: asyncio.Task[Any], message: Message) -> AsyncGenerator[Message, None]:
    """This message now and then, until a task has ended. It is cancelled when nobody waits for it any more."""
    try:
        while not (await asyncio.wait((work,), timeout=PENDING_SECONDS))[0]:
            yield message
    finally:
        await end_tasks(work)


async def chunk_messages(reading: Coroutine[Any, Any, bytes]) -> AsyncGenerator[Message, None]:
    """A chunk in messages, once it is read; empty ones until then."""
    work = asyncio.create_task(reading)
    async with aclosing(pending(work, ChunkBytes(b""))) as messages:
        async for message in messages:
            yield message
    data = work.result()
    for start in range(0, len(data), MESSAGE_BYTES):
        yield ChunkBytes(data[start : start + MESSAGE_BYTES])


class ChunkServer:
    """Listens from the moment it is made; `run` serves until cancelled.

    It has what is in the chunk cache and, once `folder` is set, the model's files; of a model on the hub also what the
    Hugging Face cache has, once somebody has asked for a list. Once `pages` is set, it has pages of the KV cache that
    are on this node's disk. `refused` counts connections that were refused, `refused_frames` messages that are no
    request for a chunk.
    """

    def __init__(self, host: str, identity: Identity, cache: ChunkCache) -> None:
        self.folder: ModelFolder | None = None
        self.pages: PageFolder | None = None
        self._cache = cache
        self._hub: HubChunks | None = None
        self._context = data_server(identity)
        self._guests = 0
        self._members = set[Channel]()
        self.refused = self.refused_frames = 0
        self._reads = asyncio.Semaphore(READS)
        self._socket = listen(host, 0)
        self.port = int(self._socket.getsockname()[1])

    async def run(self) -> None:
        """Accept for ever. What is wrong with one connection is logged and ends nothing else."""
        await serve_connections(self._socket, self._serve)

    def close(self) -> None:
        """Stop listening, if `run` has not begun."""
        self._socket.close()

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        if self._guests >= MAX_GUESTS:
            sock.close()
            self._refuse(peer, f"{MAX_GUESTS} connections without a certificate are open already")
            return
        if self._is_full() and self._idlest() is None:
            sock.close()
            self._refuse(peer, f"{len(self._members)} nodes fetch weights already")
            return
        self._guests += 1
        try:
            channel = await accept_tls(sock, self._context, peer, FromFetcher, 2 * MESSAGE_BYTES)
        except OSError as error:
            sock.close()
            self._refuse(peer, reason_of(error))
            return
        finally:
            self._guests -= 1
        if self._is_full() and (idlest := self._idlest()) is not None:  # gives way to a node, and not to a stranger
            self._members.remove(idlest)
            idlest.abort()
        self._members.add(channel)
        try:
            await channel.run(
                {
                    OpenChunkConnection: self._greet,
                    GetChunk: lambda message: chunk_messages(self._read(message)),
                    ListHubChunks: lambda message: chunk_messages(self._list(message)),
                    FindPages: self._find_pages,
                    ListPages: lambda message: names_of(self.pages, message),
                    GetPage: lambda message: chunk_messages(self._read_page(message)),
                }
            )
        except TllmError as error:
            log.warning("%s was lent no more weights: %s", channel.peer_name(), error.message)
        finally:
            self._members.discard(channel)
            self.refused_frames += channel.refused
            await channel.close()

    def _is_full(self) -> bool:
        """Whether this process needs its other descriptors for its own connections, for links and for files."""
        return len(self._members) >= open_files(NODES_FILES) // 4

    def _idlest(self) -> Channel | None:
        """The node that has been idle for the longest time, if that is long enough; one that is answered is not."""
        idle = [channel for channel in self._members if not channel.is_answering]
        idlest = min(idle, key=lambda channel: channel.heard, default=None)
        return idlest if idlest is not None and time.monotonic() - idlest.heard >= IDLE_SECONDS else None

    def _refuse(self, peer: str, why: str) -> None:
        self.refused += 1
        log.warning("%s was refused weights: %s", peer, why)

    async def _greet(self, message: OpenChunkConnection) -> None:
        """Nothing: a connection here is for nothing else anyway."""

    async def _read(self, wanted: GetChunk) -> bytes:
        async with self._reads:
            data = await asyncio.to_thread(self._lookup, wanted)
        if data is None:
            raise WeightsError(f"chunk {wanted.number} of {wanted.file[:80]} is not here any more")
        return data

    async def _list(self, wanted: ListHubChunks) -> bytes:
        async with self._reads:
            return await asyncio.to_thread(self._listed, wanted)

    async def _find_pages(self, message: FindPages) -> Message:
        return boxes_of(self.pages, message)

    async def _read_page(self, wanted: GetPage) -> bytes:
        async with self._reads:
            return await asyncio.to_thread(file_of, self.pages, wanted)

    def _lookup(self, wanted: GetChunk) -> bytes | None:
        cached = self._cache.take(wanted.digest)
        if cached is not None:
            return cached
        chunk = FileChunk(wanted.file, wanted.number)
        if self.folder is not None:
            return self.folder.chunk(chunk)
        hub = self._hub
        return hub.kept(chunk) if hub is not None and hub.has_chunk(chunk) else None

    def _listed(self, wanted: ListHubChunks) -> bytes:
        """The table of hashes. WeightsError for what is no repository."""
        hub = self._hub = HubChunks(wanted.repository, self._cache)
        return b"".join(digest or bytes(DIGEST_BYTES) for digest in hub.digests(wanted.file))


async def receive_bytes(
    channel: Channel, wanted: GetChunk | ListHubChunks | GetPage, most: int, seconds: float
) -> bytes:
    """A chunk, a list or a page's file from the other end, each message within the deadline. Nothing of it is checked
    yet. No more is taken once there are more than `most` bytes."""
    out = bytearray()
    async with aclosing(channel.stream(wanted, seconds)) as pieces:
        async for piece in pieces:
            out += piece.data
            if len(out) > most:
                break
    return bytes(out)


def has_hash(data: bytes, digest: bytes) -> bool:
    """Whether the SHA-256 of these bytes is `digest`."""
    return hashlib.sha256(data).digest() == digest


def boxes_of(pages: PageFolder | None, wanted: FindPages) -> PagesFound:
    """What the folder has of some pages; nothing where another model is served, or none."""
    if pages is None or pages.folder.name != wanted.model:
        return PagesFound(((),) * len(wanted.names))
    return PagesFound(tuple(pages.boxes(name) for name in wanted.names))


async def names_of(pages: PageFolder | None, wanted: ListPages) -> AsyncGenerator[Message, None]:
    """The names of all pages."""
    names = pages.names() if pages is not None and pages.folder.name == wanted.model else ()
    for start in range(0, len(names), NAMES_AT_ONCE):
        yield PageNames(tuple(names[start : start + NAMES_AT_ONCE]))


def file_of(pages: PageFolder | None, wanted: GetPage) -> bytes:
    """A file. WeightsError for one that is not there."""
    box = Box(*wanted.box)
    if pages is None or pages.folder.name != wanted.model or box not in pages.boxes(wanted.name):
        raise WeightsError("this page is not here")
    try:
        with pages.path(wanted.name, box).open("rb") as file:
            return file.read(FILE_BYTES)
    except OSError as error:
        raise WeightsError("this page is not here any more") from error
