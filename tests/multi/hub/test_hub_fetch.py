"""A node's chunks: from its disk, else from the hub, else from other nodes; the same bytes wherever they come from."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, try_to_load_from_cache

from tests.multi.hub.conftest import FILE, ROOM, SIZE
from tests.support.hub.fake_hub import FakeHub
from tllm.cluster.weight_messages import ReadBytes
from tllm.core.errors import ClusterError, WeightsError
from tllm.hub.byte_ranges import HubStopped
from tllm.hub.folders import local_file
from tllm.hub.hub_client import download
from tllm.hub.part_files import link_blob
from tllm.hub.repository import HubFile, Repository
from tllm.node.weights.hub_chunks import HubChunks
from tllm.node.weights.hub_fetch import HubFetch
from tllm.node.weights.hub_folder import HubFolder
from tllm.node.weights.whole_files import put_together
from tllm.weights.byte_spans import one_span
from tllm.weights.chunk_cache import ChunkCache
from tllm.weights.file_chunks import CHUNK_MIN, FileChunk, runs
from tllm.weights.remote_files import FetchedFiles


class Others:
    """The other nodes, which have every chunk. `given` are the chunks that were asked of them, which are put into the
    node's cache, as a `ChunkFetcher` does."""

    def __init__(self, content: bytes, cache: ChunkCache | None = None) -> None:
        self.cache = cache
        self.content, self.is_dropped = content, False
        self.given: list[int] = []
        self.told: list[tuple[bytes, int, str]] = []

    def __call__(self, file: str, start: int, stop: int) -> bytes:
        return self.content[start:stop]

    def expect(self, chunks: Sequence[FileChunk], sizes: Mapping[str, int]) -> None:
        self.is_dropped = False

    def chunk(self, chunk: FileChunk) -> tuple[bytes, str]:
        self.given.append(chunk.number)
        data = self.content[chunk.number * CHUNK_MIN : (chunk.number + 1) * CHUNK_MIN]
        if self.cache is not None:
            self.cache.put(hashlib.sha256(data).digest(), data)
        return data, "other"

    def found(self, folder: Path) -> None:
        raise AssertionError("of a model on the hub no node has a folder")

    def came(self, digest: bytes, nbytes: int, source: str) -> None:
        self.told.append((digest, nbytes, source))


def files_of(repository: Repository, kept: Path | None, others: Others) -> FetchedFiles:
    chunks = HubChunks(repository, ChunkCache(kept, ROOM))
    chunks.ranges._pause = 0.0
    return FetchedFiles(HubFetch(chunks, others), chunks.sizes)


def read(files: FetchedFiles, *spans: tuple[int, int]) -> list[bytes]:
    files.expect((FILE, one_span(*span)) for span in spans)
    return [files.read(FILE, *span) for span in spans]


@pytest.mark.parametrize(
    ("repo", "commit", "file"),
    [
        ("../x", "a" * 40, HubFile("model.safetensors", 1, "b" * 64)),
        ("org/name@main", "a" * 40, HubFile("model.safetensors", 1, "b" * 64)),
        ("ollama:x", "a" * 40, HubFile("model.safetensors", 1, "b" * 64)),
        ("org/name", "../../x", HubFile("model.safetensors", 1, "b" * 64)),
        ("org/name", "a" * 40, HubFile("../model.safetensors", 1, "b" * 64)),
        ("org/name", "a" * 40, HubFile("model.safetensors", 1, "../../x")),
        ("org/name", "a" * 40, HubFile("model.safetensors", -1, "b" * 64)),
        ("org/name", "a" * 40, HubFile("model.safetensors", 1 << 60, "b" * 64)),
    ],
)
def test_what_another_machine_names_leads_out_of_no_folder(repo: str, commit: str, file: HubFile) -> None:
    with pytest.raises(WeightsError, match=r"is no commit of a model|names, sizes or hashes are none"):
        HubChunks(Repository(repo, commit, (file,)), ChunkCache(None, 0))


def test_runs_follow_each_other() -> None:
    chunks = [*(FileChunk("a", number) for number in (0, 1, 2, 4, 5)), FileChunk("b", 6)]
    assert [[chunk.number for chunk in run] for run in runs(chunks, 2)] == [[0, 1], [2], [4, 5], [6]]


def test_only_what_is_wanted_is_fetched_and_kept(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path
) -> None:
    others, spans = Others(content), ((CHUNK_MIN, 3 * CHUNK_MIN + 5), (SIZE - 10, SIZE))
    files = files_of(repository, tmp_path / "kept", others)
    assert read(files, *spans) == [content[start:stop] for start, stop in spans]
    wanted = 3 * CHUNK_MIN + 1234
    assert hub.weights_sent() == files.fetched == wanted
    assert sum(size for _, size, _ in others.told) == wanted and not others.given
    assert sum("GET /org/name/" in request for request in hub.requests) == 2, "one for each run"

    again = files_of(repository, tmp_path / "kept", others)
    assert read(again, *spans) == [content[start:stop] for start, stop in spans]
    assert hub.weights_sent() == wanted and again.fetched == 0 and again.bytes_read == wanted


def test_a_damaged_chunk_or_table_is_fetched_again(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    read(files_of(repository, kept, Others(content)), (0, 4 * CHUNK_MIN))
    chunks = [path for path in kept.iterdir() if path.is_file()]
    chunks[0].write_bytes(bytes(CHUNK_MIN))
    table = next((kept / "hub").iterdir())
    table.write_bytes(table.read_bytes()[:40])
    hub.sent.clear()
    assert read(files_of(repository, kept, Others(content)), (0, 4 * CHUNK_MIN)) == [content[: 4 * CHUNK_MIN]]
    assert 3 * CHUNK_MIN <= hub.weights_sent() <= 4 * CHUNK_MIN


def test_where_the_hub_fails_in_midway_the_rest_comes_from_other_nodes(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = Others(content, ChunkCache(tmp_path / "kept", ROOM))
    files = files_of(repository, tmp_path / "kept", others)
    spans = [(number * CHUNK_MIN, (number + 1) * CHUNK_MIN) for number in range(0, 20, 2)]
    files.expect((FILE, one_span(*span)) for span in spans)
    assert files.read(FILE, *spans[0]) == content[slice(*spans[0])]
    hub.status = 503
    assert [files.read(FILE, *span) for span in spans] == [content[start:stop] for start, stop in spans]
    assert others.given and others.given[-1] == 18
    assert "weights come from other nodes from now on, and not from the hub" in caplog.text
    assert set(files.sources) == {"other", hub.url.removeprefix("http://")}
    chunks = HubChunks(repository, ChunkCache(tmp_path / "kept", ROOM))
    for start, stop in spans:
        kept = chunks.kept(FileChunk(FILE, start // CHUNK_MIN))
        assert kept == content[start:stop], "what other nodes gave is found at the next start too"


def test_a_file_of_the_hugging_face_cache_is_read_there(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path
) -> None:
    download(repository)
    hub.sent.clear()
    assert read(files_of(repository, tmp_path / "kept", Others(content)), (5, SIZE)) == [content[5:]]
    assert not hub.sent and not list((tmp_path / "kept").iterdir())


def test_what_two_programs_of_a_machine_want_at_once_comes_once(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path
) -> None:
    wanted = [[FileChunk(FILE, number) for number in numbers] for numbers in (range(10), range(5, 15), range(3, 4))]
    two = [HubChunks(repository, ChunkCache(tmp_path / "kept", ROOM)) for _ in wanted]
    hub.stall = 0.2
    with ThreadPoolExecutor(len(two)) as pool:
        found = [
            found.result() for found in [pool.submit(one.fetch, run) for one, run in zip(two, wanted, strict=True)]
        ]
    for pieces, run in zip(found, wanted, strict=True):
        assert [piece.data for piece in pieces] == [content[one.number * CHUNK_MIN :][:CHUNK_MIN] for one in run]
    came = [piece.digest for pieces in found for piece in pieces if piece.came]
    assert len(came) == len(set(came)) == 15 and hub.weights_sent() == 15 * CHUNK_MIN


def test_who_waits_for_what_another_program_fetches_may_want_it_no_more(
    hub: FakeHub, repository: Repository, tmp_path: Path
) -> None:
    first, second = (HubChunks(repository, ChunkCache(tmp_path / "kept", ROOM)) for _ in range(2))
    hub.goes_on.clear()
    with ThreadPoolExecutor(2) as pool:
        fetching = pool.submit(first.fetch, [FileChunk(FILE, 0)])
        while not any(request.startswith("HEAD") for request in hub.requests):
            time.sleep(0.01)
        waiting = pool.submit(second.fetch, [FileChunk(FILE, 0)])
        second.ranges.is_stopped = True
        with pytest.raises(HubStopped, match="wanted no more"):
            waiting.result(30)
        hub.goes_on.set()
        assert fetching.result(30)[0].came


def test_without_a_cache_nothing_is_kept(
    hub: FakeHub, repository: Repository, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(files_of(repository, None, Others(content)), (0, SIZE)) == [content]
    assert "give a larger --weights-cache-size" in caplog.text


def test_a_load_that_is_wanted_no_more_is_woken(hub: FakeHub, repository: Repository, content: bytes) -> None:
    others = Others(content)
    files = files_of(repository, None, others)
    files.expect([(FILE, one_span(0, SIZE))])
    others.is_dropped, hub.stall = True, 3.0
    with pytest.raises(ClusterError, match="wanted no more"):
        files.read(FILE, 0, 10)


def test_the_coordinator_vouches_for_what_it_fetched(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path
) -> None:
    folder = HubFolder(tmp_path, HubChunks(repository, ChunkCache(tmp_path / "kept", ROOM)))
    wanted = FileChunk(FILE, 3)
    data = content[3 * CHUNK_MIN : 4 * CHUNK_MIN]
    assert folder.hash_of(wanted) == hashlib.sha256(data).digest()
    assert folder.chunk(wanted) == data
    assert hub.weights_sent() == CHUNK_MIN, "once, for the hash and for the node"
    assert folder.read(ReadBytes(FILE, 0, 100)).data == content[:100]
    for file, number in (("../x", 0), (FILE, 21), (FILE, -1)):
        with pytest.raises(WeightsError):
            folder.chunk(FileChunk(file, number))


def test_what_came_in_ranges_is_put_together_though_the_hub_is_gone(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path
) -> None:
    """Ranges of two programs of this machine; other programs find the file where the hub's library would put it."""
    kept = tmp_path / "kept"
    for spans in ((0, 9 * CHUNK_MIN), (8 * CHUNK_MIN, SIZE)):
        read(files_of(repository, kept, Others(content)), spans)
    assert local_file(repository, repository.files[0]) is None
    hub.status = 503
    put_together(repository, kept)
    assert hub.weights_sent() == SIZE, "nothing more"
    found = Path(str(try_to_load_from_cache("org/name", FILE, constants.HF_HUB_CACHE, repository.commit)))
    assert found.read_bytes() == content and found.resolve().name == hashlib.sha256(content).hexdigest()
    assert found.resolve().parent.name == "blobs" and not list(found.resolve().parent.glob("*.part"))
    before = found.stat().st_mtime_ns
    put_together(repository, kept)
    assert found.stat().st_mtime_ns == before, "it is there"


def test_of_what_came_in_ranges_the_rest_is_fetched(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    put_together(repository, kept)
    assert local_file(repository, repository.files[0]) is None and not hub.sent, "of nothing nothing is made"
    read(files_of(repository, kept, Others(content)), (CHUNK_MIN, 12 * CHUNK_MIN))
    damaged = next(path for path in kept.iterdir() if path.is_file())
    damaged.write_bytes(bytes(CHUNK_MIN))
    hub.sent.clear()
    put_together(repository, kept)
    assert hub.weights_sent() == SIZE - 11 * CHUNK_MIN + CHUNK_MIN
    place = local_file(repository, repository.files[0])
    assert place is not None and place.read_bytes() == content


def test_what_is_not_the_file_gets_no_name(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the hub's hash is of another file: then all of it is fetched, and refused there if it is so again."""
    kept = tmp_path / "kept"
    read(files_of(repository, kept, Others(content)), (0, SIZE))
    table = next((kept / "hub").iterdir())
    digests = table.read_bytes()
    table.write_bytes(digests[32:64] + digests[32:])
    put_together(repository, kept)
    assert local_file(repository, repository.files[0]) is None
    assert "does not have the hash that the hub gives" in caplog.text
    assert not list((tmp_path / "hf").rglob("*.part"))


def test_two_programs_put_a_file_together_at_once(
    repository: Repository, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds no file at its place, and then one; whoever reads it meanwhile finds it whole."""
    kept = tmp_path / "kept"
    read(files_of(repository, kept, Others(content)), (0, SIZE))
    link, others = Path.symlink_to, list[Path]()

    def link_late(place: Path, target: str) -> None:
        if not others:
            others.append(place)
            link_blob(repository, repository.files[0])
        link(place, target)

    monkeypatch.setattr(Path, "symlink_to", link_late)
    put_together(repository, kept)
    place = local_file(repository, repository.files[0])
    assert others and place is not None and place.read_bytes() == content
    assert [path.name for path in place.parent.iterdir()] == [FILE]


def test_what_another_commit_has_is_left_to_the_download(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path
) -> None:
    """It makes a link to it."""
    kept = tmp_path / "kept"
    read(files_of(repository, kept, Others(content)), (0, 5 * CHUNK_MIN))
    blob = Path(constants.HF_HUB_CACHE) / "models--org--name" / "blobs" / repository.files[0].etag
    blob.parent.mkdir(parents=True)
    blob.write_bytes(content)
    hub.sent.clear()
    put_together(repository, kept)
    assert local_file(repository, repository.files[0]) is None and not hub.sent
    download(repository)
    place = local_file(repository, repository.files[0])
    assert place is not None and place.resolve() == blob and not hub.sent


@pytest.mark.parametrize("fault", ["no room", "refused", "no ranges"])
def test_what_cannot_be_put_together_is_left_to_the_download(
    fault: str,
    hub: FakeHub,
    repository: Repository,
    content: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = tmp_path / "kept"
    read(files_of(repository, kept, Others(content)), (0, 9 * CHUNK_MIN))
    if fault == "no room":
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=SIZE - 1))
    elif fault == "refused":
        Path(constants.HF_HUB_CACHE).parent.mkdir(exist_ok=True)
        Path(constants.HF_HUB_CACHE).write_bytes(b"no folder")
    else:
        hub.status = 404
    put_together(repository, kept)
    said = {"no room": "too little", "refused": "Not a directory", "no ranges": "404"}[fault]
    assert "is not put together of the ranges that are here: " in caplog.text and said in caplog.text
    assert local_file(repository, repository.files[0]) is None
    parts = [path.stat().st_size for path in (tmp_path / "hf").rglob("*.part")]
    assert parts == ([9 * CHUNK_MIN] if fault == "no ranges" else []), "what there is of it stays for the download"
