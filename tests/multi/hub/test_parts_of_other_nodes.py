"""Parts of a model on the hub that only other nodes have when the hub is gone: real wires, a hub that is switched off,
and nodes of which each has only what it fetched itself."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from tests.multi.hub.conftest import FILE, ROOM
from tests.support.cluster.weight_chunks import Giver, Node, passing
from tests.support.hub.fake_hub import FakeHub
from tllm.cluster.weight_messages import GetChunk, ListHubChunks
from tllm.core.errors import WeightsError
from tllm.hub.byte_ranges import HubRanges
from tllm.hub.repository import Repository
from tllm.node.weights.chunk_server import ChunkServer
from tllm.node.weights.hub_chunks import HubChunks
from tllm.node.weights.hub_fetch import HubFetch
from tllm.node.weights.hub_folder import HubFolder
from tllm.weights.byte_spans import one_span
from tllm.weights.chunk_cache import ChunkCache
from tllm.weights.file_chunks import CHUNK_MIN, FileChunk
from tllm.weights.remote_files import FetchedFiles

pytestmark = pytest.mark.timeout(120)

LAYERS, LAYER_CHUNKS = 6, 3
HALF = 3 * LAYER_CHUNKS + 1
"""Chunks up to the end of layer 2: of the header and of three layers."""


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    """A file of six layers of three chunks each, behind a header that fills one."""
    (tmp_path / "model").mkdir()
    layers = {
        f"model.layers.{n}.mlp.up_proj.weight": torch.frombuffer(
            bytearray(os.urandom(LAYER_CHUNKS * CHUNK_MIN)), dtype=torch.uint8
        )
        for n in range(LAYERS)
    }
    plain = len(_saved(tmp_path, layers, "")) - LAYERS * LAYER_CHUNKS * CHUNK_MIN
    data = _saved(tmp_path, layers, "x" * (CHUNK_MIN - plain))
    assert len(data) == (1 + LAYERS * LAYER_CHUNKS) * CHUNK_MIN
    return data


def _saved(folder: Path, tensors: dict[str, torch.Tensor], note: str) -> bytes:
    path = folder / "model" / FILE
    save_file(tensors, path, {"note": note})
    return path.read_bytes()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before what a hub that is gone is asked again."""
    monkeypatch.setattr(HubRanges.__init__, "__defaults__", (0.0,))


def first_machine(repository: Repository, tmp_path: Path) -> HubFolder:
    """The coordinator's files: of the model it has the header, as any that has read it."""
    chunks = HubChunks(repository, ChunkCache(tmp_path / "first", ROOM))
    chunks.chunk(FileChunk(FILE, 0))
    return HubFolder(tmp_path, chunks)


def files(repository: Repository, node: Node) -> FetchedFiles:
    """As a rank of the node reads them."""
    chunks = HubChunks(repository, node.fetcher.cache)
    return FetchedFiles(HubFetch(chunks, node.fetcher), chunks.sizes)


def read(repository: Repository, node: Node, start: int, stop: int) -> tuple[bytes, dict[str, int]]:
    """Chunks [start, stop), and bytes by who gave them."""
    source, span = files(repository, node), one_span(start * CHUNK_MIN, stop * CHUNK_MIN)
    source.expect([(FILE, span)])
    return source.read(FILE, span.start, span.stop), source.sources


def two_halves(giver: Giver, nodes: list[Node], repository: Repository, tmp_path: Path) -> None:
    """Nodes that have fetched the layers of a stage each, from the hub."""
    nodes += [Node(giver, name, tmp_path / name) for name in ("east", "west")]
    read(repository, nodes[0], 0, HALF)
    read(repository, nodes[1], HALF, 1 + LAYERS * LAYER_CHUNKS)


def test_layers_come_from_the_nodes_that_have_them_when_the_hub_is_gone(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with passing(first_machine(repository, tmp_path)) as (giver, nodes):
        two_halves(giver, nodes, repository, tmp_path)
        hub.status = 503
        sent = hub.weights_sent()
        nodes.append(Node(giver, "north", tmp_path / "north"))
        came, sources = read(repository, nodes[2], 2, 15)
        assert came == content[2 * CHUNK_MIN : 15 * CHUNK_MIN]
        assert sources == {"east": (HALF - 2) * CHUNK_MIN, "west": (15 - HALF) * CHUNK_MIN}
        assert hub.weights_sent() == sent
        kept = [path for path in (tmp_path / "first").iterdir() if path.is_file()]
        assert [path.stat().st_size for path in kept] == [CHUNK_MIN], "the first machine keeps nothing of it"
        assert caplog.text.count("is held against its hash") == 1, "once for all chunks of a file"


def private(hub: FakeHub) -> None:
    hub.repositories["org/name"].private, hub.repositories["org/name"].readers = True, {"friend"}


def gated(hub: FakeHub) -> None:
    hub.repositories["org/name"].readers = {"friend"}


@pytest.mark.parametrize("fault", ["offline", "nobody listens", "gated", "private"])
def test_however_the_hub_is_gone(
    fault: str,
    hub: FakeHub,
    repository: Repository,
    content: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a private model a hub says, to whoever may read it no more, that there is none."""
    with passing(first_machine(repository, tmp_path)) as (giver, nodes):
        two_halves(giver, nodes, repository, tmp_path)
        giver.folder.chunks.ranges._places.clear()  # type: ignore[attr-defined]  # what it was told when it might read
        if fault == "offline":
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        elif fault == "nobody listens":
            monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
            monkeypatch.setattr(
                constants,
                "HUGGINGFACE_CO_URL_TEMPLATE",
                "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}",
            )
        else:
            {"gated": gated, "private": private}[fault](hub)
        sent = hub.weights_sent()
        nodes.append(Node(giver, "north", tmp_path / "north"))
        assert read(repository, nodes[2], 5, 8)[0] == content[5 * CHUNK_MIN : 8 * CHUNK_MIN]
        assert hub.weights_sent() == sent


def test_what_nobody_has_is_named_by_its_layers_and_by_the_machines_that_were_asked(
    hub: FakeHub, repository: Repository, tmp_path: Path
) -> None:
    with passing(first_machine(repository, tmp_path)) as (giver, nodes):
        nodes += [Node(giver, name, tmp_path / name) for name in ("east", "west")]
        read(repository, nodes[0], 0, HALF)
        hub.status = 503
        with pytest.raises(WeightsError) as error:
            read(repository, nodes[1], 5, 15)
        said = error.value.message
        assert "nobody has layers 3 to 5 of org/name@" in said and f"(9 of 19 chunks of {FILE})" in said
        assert "HTTP 503" in said and "east on " in said and "west on " in said and "this machine (" in said
        assert "bring the hub back, or let a machine join" in error.value.hint


def test_a_node_that_lies_of_what_it_has_is_left_out(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its bytes have the hash that it tells, and are others."""
    with passing(first_machine(repository, tmp_path)) as (giver, nodes):
        two_halves(giver, nodes, repository, tmp_path)
        nodes.append(Node(giver, "crook", tmp_path / "crook"))
        read(repository, nodes[2], 0, HALF)
        forge(repository, nodes[2], 4)
        hub.status = 503
        nodes.append(Node(giver, "north", tmp_path / "north"))
        came, sources = read(repository, nodes[3], 2, 12)
        assert came == content[2 * CHUNK_MIN : 12 * CHUNK_MIN] and "crook" not in sources
        assert giver.weights.report()["liars"] == ["crook"]
        assert "crook has wrong bytes of model.safetensors, which are not used" in caplog.text


def forge(repository: Repository, node: Node, number: int) -> None:
    """Let a node have other bytes of a chunk, and the hash of these."""
    false = bytes(CHUNK_MIN)
    node.fetcher.cache.put(hashlib.sha256(false).digest(), false)
    HubChunks(repository, node.fetcher.cache).note(FileChunk(FILE, number), false)


def test_a_liar_that_alone_has_a_chunk_is_believed_by_nobody(
    hub: FakeHub, repository: Repository, tmp_path: Path
) -> None:
    with passing(first_machine(repository, tmp_path)) as (giver, nodes):
        two_halves(giver, nodes, repository, tmp_path)
        forge(repository, nodes[1], 15)
        hub.status = 503
        nodes.append(Node(giver, "north", tmp_path / "north"))
        with pytest.raises(WeightsError, match=r"does not make up the file whose SHA-256 the hub gave"):
            read(repository, nodes[2], 5, 8)


class Mute(ChunkServer):
    """Has chunks, says so, and gives none of them."""

    def _lookup(self, wanted: GetChunk) -> bytes | None:
        return None


def test_a_node_that_gives_nothing_is_done_without_where_another_has_the_same(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path
) -> None:
    with passing(first_machine(repository, tmp_path)) as (giver, nodes):
        nodes.append(Node(giver, "a", tmp_path / "a", Mute))
        read(repository, nodes[0], 0, HALF)
        hub.status = 503
        nodes.append(Node(giver, "north", tmp_path / "north"))
        with pytest.raises(WeightsError, match=r"nobody has layers 3 to 5"):
            read(repository, nodes[1], 5, 8)
        hub.status = 0
        giver.folder._failed = -1e9  # type: ignore[attr-defined]  # time has passed
        nodes += [Node(giver, name, tmp_path / name) for name in ("east", "west")]
        read(repository, nodes[2], 0, HALF)
        read(repository, nodes[3], HALF, 19)
        hub.status = 503
        assert read(repository, nodes[1], 5, 8) == (content[5 * CHUNK_MIN : 8 * CHUNK_MIN], {"east": 3 * CHUNK_MIN})


def test_another_coordinator_knows_by_its_own_disk_what_was_made_out_before(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("north", "south"):
        with passing(first_machine(repository, tmp_path)) as (giver, nodes):
            if name == "north":
                two_halves(giver, nodes, repository, tmp_path)
            else:
                nodes += [Node(giver, other, tmp_path / other) for other in ("east", "west")]
            hub.status = 503
            nodes.append(Node(giver, name, tmp_path / name))
            assert read(repository, nodes[2], 5, 8)[0] == content[5 * CHUNK_MIN : 8 * CHUNK_MIN]
    assert caplog.text.count("is held against its hash") == 1


def test_a_coordinator_that_has_nothing_gives_headers_that_nodes_have(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path
) -> None:
    """As one that had no part in the model, and took another's place when the hub was gone."""
    chunks = HubChunks(repository, ChunkCache(tmp_path / "first", ROOM))
    chunks.ranges._pause = 0.0
    with passing(HubFolder(tmp_path, chunks)) as (giver, nodes):
        two_halves(giver, nodes, repository, tmp_path)
        hub.status = 503
        sent = hub.weights_sent()
        nodes.append(Node(giver, "north", tmp_path / "north"))
        source = files(repository, nodes[2])
        assert source.read(FILE, 8, CHUNK_MIN + 100) == content[8 : CHUNK_MIN + 100]
        assert [chunks.kept(FileChunk(FILE, number)) is not None for number in (0, 1, 2)] == [True, True, False]
        assert read(repository, nodes[2], 5, 8)[0] == content[5 * CHUNK_MIN : 8 * CHUNK_MIN]
        assert hub.weights_sent() == sent


def test_a_stranger_is_told_of_no_file(repository: Repository, tmp_path: Path) -> None:
    """What is listed is asked for by a repository's name and hashes, which must lead out of no folder."""
    with passing(first_machine(repository, tmp_path)) as (giver, nodes):
        nodes.append(Node(giver, "east", tmp_path / "east"))
        assert nodes[0].server._listed(ListHubChunks(repository, "../../other")) == b""
        evil = msgspec.structs.replace(repository, repo="../../x")
        with pytest.raises(WeightsError, match="is no commit of a model"):
            nodes[0].server._listed(ListHubChunks(evil, FILE))
        for file, number in (("../x", 0), (FILE, -1), (FILE, 19)):
            nodes[0].server._listed(ListHubChunks(repository, FILE))
            assert nodes[0].server._lookup(GetChunk(file, number, bytes(32))) is None
