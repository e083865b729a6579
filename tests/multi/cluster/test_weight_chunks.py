"""Nodes without the model, over real wires: each byte leaves the coordinator once, is checked, and is kept."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import time
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest

from tests.support.cluster.weight_chunks import HERE, Giver, Node, passing
from tests.unit.cluster.kits import facts
from tllm.cluster.certificates import Authority
from tllm.cluster.channel import QUESTION
from tllm.cluster.connection import connect_tls
from tllm.cluster.messages import PROTOCOL, Attach, Message, ToFetcher
from tllm.cluster.tls import guest_client, member_client, unverified_client
from tllm.cluster.weight_messages import GetChunk, OpenChunkConnection
from tllm.core.errors import AuthError, ClusterError, WeightsError
from tllm.node.weights.chunk_server import ChunkServer
from tllm.weights.byte_spans import one_span
from tllm.weights.file_chunks import CHUNK_MIN

FILE = "model.safetensors"
SIZE = 12 * CHUNK_MIN + 1234
CONTENT = random.Random(0).randbytes(SIZE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / FILE).write_bytes(CONTENT)
    return made


class Liar(ChunkServer):
    """Passes on as many bytes as were asked for, and others."""

    def _lookup(self, wanted: GetChunk) -> bytes | None:
        data = super()._lookup(wanted)
        return None if data is None else bytes(len(data))


def read(node: Node, start: int = 0, stop: int = SIZE) -> dict[str, int]:
    """Read a range as loading does, in parts; bytes by who gave them."""
    source = node.files()
    source.expect([(FILE, one_span(start, stop))])
    parts = [source.read(FILE, at, min(at + 50_000, stop)) for at in range(start, stop, 50_000)]
    assert b"".join(parts) == CONTENT[start:stop]
    return source.sources


def brought(giver: Giver, total: int) -> dict[tuple[str, str], int]:
    """Bytes by node and source once they are `total`: what came last is told after it is given to whoever reads."""
    end = time.monotonic() + 30
    while True:
        ways = {(way["node"], way["source"]): way["bytes"] for way in giver.weights.report()["brought"]}
        if sum(ways.values()) == total:
            return ways
        assert time.monotonic() < end, f"of {total} bytes {ways} were told"
        time.sleep(0.005)


def test_nodes_that_want_the_same_get_it_from_the_coordinator_once(folder: Path, tmp_path: Path) -> None:
    half = 6 * CHUNK_MIN
    with passing(folder) as (giver, nodes):
        nodes += [Node(giver, name, tmp_path / name) for name in ("east", "west", "north")]
        with ThreadPoolExecutor(3) as pool:
            sources = list(pool.map(read, nodes, (0, 0, 0), (SIZE, SIZE, half)))
        assert giver.sent.total() == SIZE, "each byte once, counted on the wire"
        assert sum(one.get("coordinator", 0) for one in sources) == SIZE
        assert [sum(one.values()) for one in sources] == [SIZE, SIZE, half]
        ways = brought(giver, 2 * SIZE + half)
        stats = giver.weights.stats()
        assert stats.pop("weights_liars") == 0
        assert stats == {f"weights_bytes/{node}/{source}": n for (node, source), n in ways.items()}


def test_what_was_broken_off_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    """First the connection breaks in a chunk, then the whole node ends; what was whole by then is not sent again."""
    with passing(folder) as (giver, nodes):
        nodes.append(Node(giver, "east", tmp_path / "kept"))
        giver.breaks_at = 2 * CHUNK_MIN + 1
        read(nodes[0], 0, 5 * CHUNK_MIN)
        assert giver.sent.total() <= (5 + 4) * CHUNK_MIN, "no more than was under way is sent twice"
        nodes.pop().end()
        before = giver.sent.total()
        nodes.append(Node(giver, "west", tmp_path / "kept"))
        sources = read(nodes[0])
        assert sources == {"coordinator": SIZE - 5 * CHUNK_MIN}
        assert giver.sent.total() - before == SIZE - 5 * CHUNK_MIN


def test_what_was_damaged_on_the_disk_is_fetched_again(folder: Path, tmp_path: Path) -> None:
    with passing(folder) as (giver, nodes):
        nodes.append(Node(giver, "east", tmp_path / "kept"))
        read(nodes[0])
        spoilt = next(path for path in (tmp_path / "kept").iterdir() if path.stat().st_size == CHUNK_MIN)
        spoilt.write_bytes(bytes(CHUNK_MIN))
        assert read(nodes[0]) == {"coordinator": CHUNK_MIN}


def test_a_neighbour_that_lies_is_named_and_its_bytes_are_not_used(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with passing(folder) as (giver, nodes):
        nodes.append(Node(giver, "liar", tmp_path / "liar", Liar))
        read(nodes[0])
        nodes.append(Node(giver, "west", tmp_path / "west"))
        assert read(nodes[1]) == {"coordinator": SIZE}
        assert giver.weights.report()["liars"] == ["liar"]
        assert "liar gave wrong bytes" in caplog.text
        nodes.append(Node(giver, "north", tmp_path / "north"))
        assert read(nodes[2]) == {"west": SIZE}, "nobody asks the liar again"
        assert giver.sent.total() == 2 * SIZE


def test_a_neighbour_that_is_gone_is_done_without(folder: Path, tmp_path: Path) -> None:
    with passing(folder) as (giver, nodes):
        nodes += [Node(giver, name, tmp_path / name) for name in ("east", "west")]
        read(nodes[0])
        nodes[0].stop_serving()  # a machine that still speaks to the coordinator, and to nobody else
        assert read(nodes[1]) == {"coordinator": SIZE}
        assert giver.weights.report()["liars"] == []


def test_files_that_are_gone_from_the_coordinator_come_from_who_has_them(folder: Path, tmp_path: Path) -> None:
    with passing(folder) as (giver, nodes):
        nodes += [Node(giver, name, tmp_path / name) for name in ("east", "west")]
        read(nodes[0], 0, 8 * CHUNK_MIN)
        (folder / FILE).write_bytes(b"")
        assert read(nodes[1], 0, 8 * CHUNK_MIN) == {"east": 8 * CHUNK_MIN}
        with pytest.raises(WeightsError, match=r"ends at byte"):
            read(nodes[1])


def test_files_that_changed_at_the_coordinator_are_not_used(folder: Path, tmp_path: Path) -> None:
    with passing(folder) as (giver, nodes):
        nodes += [Node(giver, "east", None), Node(giver, "west", None)]
        read(nodes[0])
        (folder / FILE).write_bytes(bytes(SIZE))
        with pytest.raises(WeightsError, match=r"nobody is left who gives west chunk 0 of model\.safetensors"):
            read(nodes[1])
        assert giver.weights.report()["liars"] == ["coordinator"]


def test_a_node_that_has_the_model_gives_of_it(folder: Path, tmp_path: Path) -> None:
    with passing(folder) as (giver, nodes):
        nodes += [Node(giver, "disk", None), Node(giver, "west", tmp_path / "west")]
        nodes[0].fetcher.found(folder)
        sources = read(nodes[1])
        assert sources["disk"] > 4 * CHUNK_MIN and sources["coordinator"] > 4 * CHUNK_MIN
        assert giver.sent.total() == sources["coordinator"] == SIZE - sources["disk"]


def ask(where: tuple[str, int], context: ssl.SSLContext, name: str, message: Message) -> None:
    """What a fetcher does, with any certificate and any question. ClusterError if it is not answered."""

    async def scene() -> None:
        channel = await connect_tls(where, context, name, ToFetcher, 2**20, 30.0)
        try:
            await channel.send(OpenChunkConnection())
            await channel.write(QUESTION, 1, message)
            if await channel.receive_within(30.0) is None:
                raise ClusterError("it closed")
        finally:
            channel.abort()
            await asyncio.sleep(0)

    asyncio.run(scene())


def test_nobody_uninvited_is_given_anything(folder: Path, tmp_path: Path) -> None:
    """Neither at a node's port nor, on a connection for weights, at the coordinator's."""
    with passing(folder) as (giver, nodes):
        nodes.append(Node(giver, "east", tmp_path / "east"))
        read(nodes[0])
        where, wanted = (HERE, nodes[0].server.port), GetChunk(FILE, 0, sha256(CONTENT[:CHUNK_MIN]).digest())
        stranger = member_client(Authority.create().identity("west"))
        without = guest_client(giver.authority.pem)
        unchecked = unverified_client()
        for context in (stranger, without, unchecked):
            with pytest.raises((AuthError, ClusterError)):
                ask(where, context, "east", wanted)
        with socket.create_connection(where) as plain:
            plain.settimeout(30)
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                while plain.recv(1000):
                    pass
        member = member_client(giver.authority.identity("gone"))
        with pytest.raises(ClusterError):
            ask(where, member, "east", Attach(PROTOCOL, facts("gone")))
        with pytest.raises(ClusterError):
            ask(giver.address, member, "coordinator", wanted)
        server, until = nodes[0].server, time.monotonic() + 30
        while (server.refused, server.refused_frames) != (4, 1) and time.monotonic() < until:
            time.sleep(0.005)  # who was refused hears of it before it is counted
        assert (server.refused, server.refused_frames) == (4, 1)
        nodes.append(Node(giver, "west", tmp_path / "west"))
        assert read(nodes[1]) == {"east": SIZE}
        assert giver.sent.keys() == {"east"}


def test_who_waits_for_another_is_woken_when_it_is_lost_or_when_the_epoch_is_over(folder: Path, tmp_path: Path) -> None:
    """One that is here no more was to bring the first chunk: until that is known, everyone waits for it."""
    with passing(folder) as (giver, nodes), ThreadPoolExecutor(1) as pool:
        nodes.append(Node(giver, "east", tmp_path / "east"))
        first = sha256(CONTENT[:CHUNK_MIN]).digest()
        assert giver.weights.catalogue.source("ghost", first, time.monotonic()) == "coordinator"

        def reads() -> Future[dict[str, int]]:
            reading = pool.submit(read, nodes[0])
            with pytest.raises(TimeoutError):
                reading.result(0.5)
            return reading

        reading = reads()
        nodes[0].soon(nodes[0].fetcher.drop)
        with pytest.raises(ClusterError, match="is wanted no more"):
            reading.result(30)
        reading = reads()
        giver.forget("ghost")
        assert sum(reading.result(30).values()) >= SIZE - 4 * CHUNK_MIN
        assert giver.sent.total() < SIZE + 4 * CHUNK_MIN


def test_what_is_wanted_no_more_ends_at_once(folder: Path) -> None:
    with passing(folder) as (giver, nodes):
        nodes.append(Node(giver, "east", None))
        nodes[0].fetcher.epoch = 3
        with pytest.raises(ClusterError, match="epoch 3 is over"):
            read(nodes[0])
