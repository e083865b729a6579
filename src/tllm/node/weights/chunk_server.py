"""`ChunkServer`: passes chunks of weights on to other nodes, each on a connection of its own that carries nothing else.

Connections are mutual TLS, as on the data wire: only nodes of this cluster may ask, and only for chunks by their hash.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing

from tllm.cluster.certificates import Identity
from tllm.cluster.channel import Channel
from tllm.cluster.connection import accept, listen, take, words
from tllm.cluster.messages import ChunkBytes, FromBorrower, GetChunk, Message, OpenChunkConnection
from tllm.cluster.tls import data_server
from tllm.core.errors import TllmError, WeightsError
from tllm.node.weights.model_folder import ModelFolder
from tllm.weights.chunk_cache import ChunkCache
from tllm.weights.file_chunks import FileChunk

log = logging.getLogger("tllm.node")

LENT_BYTES = 256 * 1024
"""Bytes of one message: each that comes shows that the lender lives, on slow links too."""

BORROWERS = 64
READS = 4  # chunks in memory at once, whoever asks


async def lent(reading: Awaitable[bytes]) -> AsyncIterator[Message]:
    """A chunk in messages, once it is read."""
    data = await reading
    for start in range(0, len(data), LENT_BYTES):
        yield ChunkBytes(data[start : start + LENT_BYTES])


class ChunkServer:
    """Listens from the moment it is made; `run` serves until cancelled.

    It has what is on the shelf and, once `folder` is set, the model's files. `refused` counts connections that were
    shown out, `refused_frames` what nodes sent that is no question.
    """

    def __init__(self, host: str, identity: Identity, shelf: ChunkCache) -> None:
        self.folder: ModelFolder | None = None
        self._shelf = shelf
        self._context = data_server(identity)
        self._borrowers = 0
        self.refused = self.refused_frames = 0
        self._reads = asyncio.Semaphore(READS)
        self._socket = listen(host, 0)
        self.port = int(self._socket.getsockname()[1])

    async def run(self) -> None:
        """Accept for ever. What is wrong with one connection is said and ends nothing else."""
        await accept(self._socket, self._serve)

    def close(self) -> None:
        """Stop listening, if `run` has not begun."""
        self._socket.close()

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        if self._borrowers >= BORROWERS:
            self._refuse(sock, peer, f"{BORROWERS} connections are open already")
            return
        self._borrowers += 1
        try:
            channel = await take(sock, self._context, peer, FromBorrower, 2 * LENT_BYTES)
        except OSError as error:
            self._refuse(sock, peer, words(error))
            self._borrowers -= 1
            return
        try:
            await channel.run({OpenChunkConnection: self._greet, GetChunk: lambda message: lent(self._read(message))})
        except TllmError as error:
            log.warning("%s was lent no more weights: %s", channel.peer_name(), error.message)
        finally:
            self._borrowers -= 1
            self.refused_frames += channel.refused
            await channel.close()

    def _refuse(self, sock: socket.socket, peer: str, why: str) -> None:
        sock.close()
        self.refused += 1
        log.warning("%s was refused weights: %s", peer, why)

    async def _greet(self, message: OpenChunkConnection) -> None:
        """Nothing: a connection here is for nothing else anyway."""

    async def _read(self, wanted: GetChunk) -> bytes:
        async with self._reads:
            data = await asyncio.to_thread(self._found, wanted)
        if data is None:
            raise WeightsError(f"chunk {wanted.number} of {wanted.file[:80]} is not here any more")
        return data

    def _found(self, wanted: GetChunk) -> bytes | None:
        kept = self._shelf.take(wanted.digest)
        if kept is not None or self.folder is None:
            return kept
        return self.folder.chunk(FileChunk(wanted.file, wanted.number))


async def borrowed(channel: Channel, wanted: GetChunk, size: int, seconds: float) -> bytes:
    """A chunk of `size` bytes from the other end, each message within the deadline. Its hash is not checked yet."""
    out = bytearray()
    async with aclosing(channel.stream(wanted, seconds)) as pieces:
        async for piece in pieces:
            if len(out) + len(piece.data) > size:
                break
            out += piece.data
    return bytes(out)


def is_whole(data: bytes, digest: bytes) -> bool:
    """Whether these are the bytes that were meant."""
    return hashlib.sha256(data).digest() == digest
