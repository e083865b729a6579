"""A coordinator that gives weights out, and nodes without the model that pass them on: real wires, and no torch."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tests.unit.cluster.kits import facts
from tllm.cluster.certificates import COORDINATOR, Authority
from tllm.cluster.channel import Channel
from tllm.cluster.control_server import ControlServer
from tllm.cluster.join import attach, join
from tllm.cluster.join_token import HOUR, TokenBook
from tllm.cluster.messages import Message
from tllm.cluster.weight_messages import ChunkBytes
from tllm.core.errors import TllmError
from tllm.node.coordinator.membership import Membership
from tllm.node.coordinator.weight_registry import WeightRegistry
from tllm.node.weights.chunk_fetcher import ChunkFetcher
from tllm.node.weights.chunk_server import ChunkServer
from tllm.node.weights.model_folder import ModelFolder
from tllm.weights.chunk_cache import ChunkCache
from tllm.weights.remote_files import FetchedFiles

HERE = "127.0.0.1"
ROOM = 2**30


class Giver:
    """The coordinator, in a thread of its own. `sent` counts bytes of weights that it wrote to each node's connection.

    Once `breaks_at` bytes were sent in all, the connection ends there and then. It has the files of a folder, or of a
    model on the hub what it is given.
    """

    def __init__(self, folder: Path | ModelFolder) -> None:
        self.sent: Counter[str] = Counter()
        self.breaks_at: int | None = None
        self.authority = Authority.create()
        self.tokens = TokenBook(self.authority.fingerprint)
        self.folder = ModelFolder(folder) if isinstance(folder, Path) else folder
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="giver", daemon=True)
        self._thread.start()
        assert self._up.wait(60)

    @property
    def sizes(self) -> dict[str, int]:
        return {file.name: file.size for file in self.folder.files}

    def forget(self, node: str) -> None:
        """As when a node is lost."""

        async def lose() -> None:
            self.weights.forget(node)

        asyncio.run_coroutine_threadsafe(lose(), self._loop).result(60)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.members = Membership(
            self.authority.cluster,
            lambda node: self.weights.acts(node),
            lambda node, error: self.weights.forget(node),
            lambda: None,
            self._lend,
        )
        self.weights = WeightRegistry(self.folder, self.members, set(), self.authority.identity(COORDINATOR))
        door = ControlServer(self.authority, self.tokens, self.members, (HERE, 0))
        self.address = (HERE, door.port)
        self._task = asyncio.create_task(door.run())
        self._up.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _lend(self, channel: Channel, node: str) -> None:
        write = channel.write

        async def counted(kind: int, number: int, message: Message | None) -> None:
            if isinstance(message, ChunkBytes):
                self.sent[node] += len(message.data)
            await write(kind, number, message)
            if self.breaks_at is not None and self.sent.total() >= self.breaks_at:
                self.breaks_at = None
                channel.abort()

        channel.write = counted  # type: ignore[method-assign]
        await self.weights.serve_chunks(channel, node)


class Node:
    """A node without the model: its control side in a thread of its own."""

    def __init__(self, giver: Giver, name: str, kept: Path | None, server: type[ChunkServer] = ChunkServer) -> None:
        self.name, self._giver = name, giver
        token = giver.tokens.issue(time.time(), 1, HOUR)
        self._identity = asyncio.run(join(giver.address, token, name))
        cache = ChunkCache(kept, ROOM)
        self.server = server(HERE, self._identity, cache)
        self.fetcher = ChunkFetcher(giver.address, self._identity, cache, self.server)
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._control()), name=name, daemon=True)
        self._thread.start()
        assert self._up.wait(60)

    def files(self) -> FetchedFiles:
        return FetchedFiles(self.fetcher, self._giver.sizes)

    def soon(self, act: Callable[[], None]) -> None:
        """Let the control side do something."""
        self._loop.call_soon_threadsafe(act)

    def stop_serving(self) -> None:
        asyncio.run_coroutine_threadsafe(self.fetcher.stop_serving(), self._loop).result(60)

    def end(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._channel.abort)
            self._thread.join(60)
        assert not self._thread.is_alive()

    async def _control(self) -> None:
        self._loop = asyncio.get_running_loop()
        known = msgspec.structs.replace(facts(self.name), lends=self.server.port)
        self._channel, _ = await attach(self._giver.address, self._identity, known)
        await self.fetcher.follow(self._channel, self._giver.address)
        self._up.set()
        with contextlib.suppress(TllmError):
            await self._channel.run({})
        await self.fetcher.close()


@contextlib.contextmanager
def passing(folder: Path | ModelFolder) -> Iterator[tuple[Giver, list[Node]]]:
    """A coordinator; nodes that the test makes and adds are ended with it."""
    giver, nodes = Giver(folder), list[Node]()
    try:
        yield giver, nodes
    finally:
        for node in nodes:
            node.end()
        giver.end()
