"""What a program leaves in the Hugging Face cache that is killed while it puts a file together: who starts next takes
it up or removes it, and two at once are in nobody's way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.multi.hub.conftest import FILE, ROOM, SIZE
from tests.support.hub.fake_hub import FakeHub
from tests.support.hub.this_machine import environment
from tllm.core.disk import STALE_SECONDS
from tllm.hub.folders import local_file
from tllm.hub.locate import locate
from tllm.hub.part_files import UNWANTED_SECONDS, held_part, part_bytes, part_of, remove_left_parts
from tllm.hub.repository import Repository
from tllm.node.weights.hub_chunks import HubChunks
from tllm.node.weights.whole_files import put_together
from tllm.weights.chunk_cache import ChunkCache
from tllm.weights.file_chunks import CHUNK_MIN

pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import logging, sys
from pathlib import Path
from tllm.hub.hub_client import list_repository
from tllm.node.weights.whole_files import put_together
logging.basicConfig(level=logging.INFO)
put_together(list_repository("org/name", "main"), Path(sys.argv[1]))
"""


def blob_of(repository: Repository) -> Path:
    return Path(constants.HF_HUB_CACHE) / "models--org--name" / "blobs" / repository.files[0].etag


def begun(hub: FakeHub, tmp_path: Path) -> subprocess.Popen[str]:
    """A program of its own that puts the model together of what is in `kept`, and of the hub."""
    variables = {**os.environ, **environment(tmp_path, hub)}
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "kept")]
    return subprocess.Popen(words, env=variables, text=True, stderr=subprocess.PIPE)


def killed_midway(hub: FakeHub, repository: Repository, tmp_path: Path, chunks: int) -> Path:
    """Let a program come so far and kill it. Returns the part that it has left."""
    with midway(hub, repository, tmp_path, chunks) as program:
        program.send_signal(signal.SIGKILL)
    hub.stall = 0.0
    hub.sent.clear()
    return part_of(blob_of(repository))


@contextmanager
def midway(hub: FakeHub, repository: Repository, tmp_path: Path, chunks: int) -> Iterator[subprocess.Popen[str]]:
    """A program that has written so many chunks, which were here, and waits for the hub."""
    HubChunks(repository, ChunkCache(tmp_path / "kept", ROOM)).read(FILE, 0, chunks * CHUNK_MIN)
    hub.stall = 60.0
    with begun(hub, tmp_path) as program:
        while part_bytes(blob_of(repository)) < (chunks - 1) * CHUNK_MIN:
            assert program.poll() is None, program.stderr and program.stderr.read()
            time.sleep(0.01)
        yield program


def is_whole(repository: Repository, content: bytes) -> bool:
    place = local_file(repository, repository.files[0])
    return place is not None and place.read_bytes() == content and not list(place.resolve().parent.glob("*.part"))


def test_who_starts_next_takes_up_what_one_that_was_killed_had_written(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path
) -> None:
    part = killed_midway(hub, repository, tmp_path, 8)
    written = part.stat().st_size // CHUNK_MIN * CHUNK_MIN
    for path in (tmp_path / "kept").iterdir():
        if path.is_file():
            path.unlink()  # the part alone has these bytes now
    put_together(repository, tmp_path / "kept")
    assert is_whole(repository, content)
    assert hub.weights_sent() == SIZE - written < SIZE


def test_it_is_taken_up_by_the_command_that_a_user_types_next(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path
) -> None:
    killed_midway(hub, repository, tmp_path, 8)
    (tmp_path / "model" / "config.json").write_text("{}")
    hub.add("org/name", tmp_path / "model")
    found = locate("org/name", "whole", reuse=lambda wanted: put_together(wanted, tmp_path / "kept"))
    assert (found.path / FILE).read_bytes() == content and not list((tmp_path / "hf").rglob("*.part"))


@pytest.mark.parametrize("damage", ["other bytes", "too long", "empty"])
def test_a_part_that_is_not_of_the_file_is_written_anew(
    damage: str, repository: Repository, content: bytes, tmp_path: Path
) -> None:
    """As after a loss of power, when a file may have bytes that were never written."""
    HubChunks(repository, ChunkCache(tmp_path / "kept", ROOM)).read(FILE, 0, SIZE)
    blob = blob_of(repository)
    blob.parent.mkdir(parents=True)
    part_of(blob).write_bytes({"other bytes": bytes(9 * CHUNK_MIN), "too long": content + b"x", "empty": b""}[damage])
    put_together(repository, tmp_path / "kept")
    assert is_whole(repository, content)


def test_two_programs_at_once_write_it_once(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path
) -> None:
    """Beside a part that a third was killed at. The second waits for the first, and writes nothing."""
    killed_midway(hub, repository, tmp_path, 8)
    hub.stall = 0.5
    programs = [begun(hub, tmp_path) for _ in range(2)]
    said = [program.communicate(timeout=60)[1] for program in programs]
    assert [program.returncode for program in programs] == [0, 0], said
    assert is_whole(repository, content)
    assert sum("was put together of ranges" in one for one in said) == 1, said
    assert hub.weights_sent() == SIZE - 8 * CHUNK_MIN


def test_who_waits_takes_up_what_one_leaves_that_is_killed_meanwhile(
    hub: FakeHub, repository: Repository, content: bytes, tmp_path: Path
) -> None:
    with midway(hub, repository, tmp_path, 8) as program:
        waiting = threading.Thread(target=put_together, args=(repository, tmp_path / "kept"))
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive(), "the part is the other's"
        program.send_signal(signal.SIGKILL)
        hub.stall = 0.0
    waiting.join(30)
    assert not waiting.is_alive() and is_whole(repository, content)


def test_parts_of_no_use_are_removed_and_others_stay(repository: Repository) -> None:
    blobs = blob_of(repository).parent
    snapshot = blobs.parent / "snapshots" / repository.commit
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    names = {letter: letter * 64 for letter in "abcd"}
    for letter in names:
        (blobs / f"{names[letter]}.part").write_bytes(b"half")
    (blobs / names["a"]).write_bytes(b"whole")  # nobody needs its part any more
    os.utime(blobs / f"{names['b']}.part", (0, time.time() - UNWANTED_SECONDS - 10))
    os.utime(blobs / f"{names['d']}.part", (0, time.time() - UNWANTED_SECONDS - 10))
    (blobs / f"{names['c']}.0a1b2c3d.part").write_bytes(b"of an earlier version")
    (blobs / f"{names['d']}.0a1b2c3d.part").write_bytes(b"of one that still writes")
    (snapshot / f"{FILE}.0a1b2c3d.part").symlink_to("../../nowhere")
    long_ago = time.time() - STALE_SECONDS - 10
    for path in (blobs / f"{names['c']}.0a1b2c3d.part", snapshot / f"{FILE}.0a1b2c3d.part"):
        os.utime(path, (0, long_ago), follow_symlinks=False)
    with held_part(blobs / f"{names['d']}.part"):
        remove_left_parts()
        left = {path.name for path in blobs.iterdir()}
    assert left == {names["a"], f"{names['c']}.part", f"{names['d']}.part", f"{names['d']}.0a1b2c3d.part"}
    assert not list(snapshot.iterdir())


def test_many_that_are_killed_leave_no_more_than_one_part(hub: FakeHub, repository: Repository, tmp_path: Path) -> None:
    for _ in range(3):
        part = killed_midway(hub, repository, tmp_path, 4)
        assert [path.name for path in part.parent.iterdir()] == [part.name]
