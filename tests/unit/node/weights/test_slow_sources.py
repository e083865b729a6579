"""Sources of weights that are slow, or do not answer: what they delay, and what they do not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tllm.cluster.certificates import COORDINATOR, Authority
from tllm.cluster.weight_messages import ChunkFound, ChunkReceived, LocateChunk, Pending, ReadBytes
from tllm.hub.repository import HubFile, Repository
from tllm.node.coordinator import weight_registry
from tllm.node.coordinator.weight_registry import READS, WeightRegistry
from tllm.node.weights import chunk_server
from tllm.node.weights.chunk_fetcher import ChunkConnections
from tllm.node.weights.chunk_server import ChunkServer
from tllm.node.weights.hub_chunks import HubChunks
from tllm.node.weights.hub_folder import HubFolder
from tllm.weights.chunk_cache import ChunkCache
from tllm.weights.file_chunks import FileChunk

HERE = "127.0.0.1"


@contextlib.asynccontextmanager
async def lending(count: int) -> AsyncGenerator[tuple[ChunkServer, ChunkFound, list[ChunkConnections]], None]:
    """A server of chunks, where it is found, and so many nodes that may connect to it."""
    authority = Authority.create()
    server = ChunkServer(HERE, authority.identity("lender"), ChunkCache(None, 0))
    running = asyncio.create_task(server.run())
    nodes = [ChunkConnections((HERE, 1), authority.identity(f"node-{number}")) for number in range(count)]
    yield server, ChunkFound(b"", "lender", HERE, server.port), nodes
    for node in nodes:
        await node.close()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_one_that_does_not_answer_is_in_no_other_nodes_way() -> None:
    """It takes connections, as the system does for a process that is stopped, and says nothing for ten seconds."""

    async def connect() -> None:
        authority = Authority.create()
        server = ChunkServer(HERE, authority.identity("lender"), ChunkCache(None, 0))
        running = asyncio.create_task(server.run())
        connections = ChunkConnections((HERE, 1), authority.identity("node"))
        waiting = asyncio.create_task(connections.to(ChunkFound(b"", "mute", HERE, mute.getsockname()[1])))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(30):
            await connections.to(ChunkFound(b"", "lender", HERE, server.port))
        for task in (waiting, running):
            task.cancel()
        await asyncio.gather(waiting, running, return_exceptions=True)
        await connections.close()

    with socket.create_server((HERE, 0)) as mute:
        asyncio.run(connect())


def test_a_node_has_its_connection_however_many_others_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has shown its certificate has no seat at the door any more, and who finds none free knocks again."""
    monkeypatch.setattr(chunk_server, "MAX_GUESTS", 1)

    async def connect() -> None:
        async with lending(3) as (server, found, nodes), asyncio.timeout(30):
            for node in nodes[:2]:
                await node.to(found)
            with socket.create_connection((HERE, server.port)):  # a stranger, who has the seat and is silent
                await asyncio.sleep(0.05)
                waiting = asyncio.create_task(nodes[2].to(found))
                while not server.refused:
                    await asyncio.sleep(0.01)
            await waiting

    asyncio.run(connect())


def test_nodes_take_a_part_of_the_descriptors_and_idle_ones_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster of a thousand nodes the connections that each keeps to each would leave none for anything else."""
    monkeypatch.setattr(chunk_server, "open_files", lambda wanted: 8)

    async def connect() -> None:
        async with lending(3) as (server, found, nodes), asyncio.timeout(30):
            first, _ = [await node.to(found) for node in nodes[:2]]
            waiting = asyncio.create_task(nodes[2].to(found))
            while not server.refused:
                await asyncio.sleep(0.01)
            assert await nodes[0].to(found) is first
            monkeypatch.setattr(chunk_server, "IDLE_SECONDS", 0.0)
            await waiting
            while await nodes[0].to(found) is first:
                await asyncio.sleep(0.01)

    asyncio.run(connect())


def test_a_stranger_ends_no_nodes_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_server, "open_files", lambda wanted: 4)
    monkeypatch.setattr(chunk_server, "IDLE_SECONDS", 0.0)

    async def connect() -> None:
        async with lending(1) as (server, found, (node,)), asyncio.timeout(30):
            first = await node.to(found)
            reader, writer = await asyncio.open_connection(HERE, server.port)
            writer.write(b"no certificate\n" * 100)
            await reader.read()
            while not server.refused:
                await asyncio.sleep(0.01)
            for _ in range(10):
                await asyncio.sleep(0.01)
                assert await node.to(found) is first
            writer.close()

    asyncio.run(connect())


class Folder:
    """Files of which `slow` chunks are read once `goes_on` is set."""

    def __init__(self, slow: int) -> None:
        self.goes_on, self._slow = threading.Event(), slow

    def hash_of(self, chunk: FileChunk) -> bytes:
        if chunk.number < self._slow:
            self.goes_on.wait(20)
        return bytes([chunk.number]) * 32


def registry(folder: Folder) -> WeightRegistry:
    return WeightRegistry(folder, SimpleNamespace(state=SimpleNamespace(epoch=0)), set())  # type: ignore[arg-type]


def located(weights: WeightRegistry, node: str, number: int) -> AsyncGenerator[Any, None]:
    return weights.acts(node)[LocateChunk](LocateChunk(0, "file", number))  # type: ignore[return-value]


def test_who_waits_for_a_chunk_hears_of_that_one_alone() -> None:
    """Each message to all who wait, for each chunk that came anywhere, would be n^2 of them for n nodes."""

    async def locate() -> list[Any]:
        weights, heard = registry(Folder(0)), list[Any]()
        assert (await anext(located(weights, "east", 0))).node == COORDINATOR

        async def wait() -> None:
            heard.extend([message async for message in located(weights, "west", 0)])

        waiting = asyncio.create_task(wait())
        for number in range(1, 20):
            await weights.acts("east")[ChunkReceived](ChunkReceived(bytes([number]) * 32, 1, COORDINATOR, True))  # type: ignore[misc]
            await asyncio.sleep(0.005)
        assert not waiting.done() and not heard
        await weights.acts("east")[ChunkReceived](ChunkReceived(bytes(32), 1, COORDINATOR, True))  # type: ignore[misc]
        weights._members.state.member = lambda node: SimpleNamespace(facts=SimpleNamespace(host=HERE, lends=7))  # type: ignore[method-assign, misc, assignment]
        async with asyncio.timeout(20):
            await waiting
        return heard

    assert asyncio.run(locate()) == [ChunkFound(bytes(32), "east", HERE, 7)]


def test_who_waits_for_the_disk_is_told_so_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chunks that come from the hub first, four may take longer than the fifth one's asker would wait."""
    for module in (weight_registry, chunk_server):
        monkeypatch.setattr(module, "PENDING_SECONDS", 0.05)

    async def locate() -> None:
        folder = Folder(READS)
        weights = registry(folder)
        asked = [located(weights, "east", number) for number in range(READS + 1)]
        assert [type(await anext(one)) for one in asked] == [Pending] * (READS + 1)
        for one in asked:
            await one.aclose()  # nobody waits for it any more, nor is told what it fails with
        folder.goes_on.set()

    asyncio.run(asyncio.wait_for(locate(), 20))


def test_a_chunk_that_comes_slowly_from_the_hub_is_in_no_headers_way(tmp_path: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    files = tuple(HubFile(f"{name}.safetensors", 100, letter * 64) for name, letter in (("a", "a"), ("b", "b")))
    chunks = HubChunks(Repository("org/name", "c" * 40, files), ChunkCache(tmp_path, 1000))

    def fetch(chunk: FileChunk) -> bytes:
        if chunk.file.startswith("a"):
            begun.set()
            goes_on.wait(20)
        return bytes(100)

    chunks.chunk = fetch  # type: ignore[method-assign]
    folder = HubFolder(tmp_path, chunks)
    slow = threading.Thread(target=lambda: folder.chunk(FileChunk(files[0].name, 0)), daemon=True)
    slow.start()
    assert begun.wait(20)
    quick = threading.Thread(target=lambda: folder.read(ReadBytes(files[1].name, 0, 8)), daemon=True)
    quick.start()
    quick.join(20)
    with contextlib.ExitStack() as ending:
        ending.callback(goes_on.set)
        assert not quick.is_alive()
