"""Pages of other nodes: what is brought, what is copied in idle time, and nodes that are gone, slow or wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.unit.engine.page_store.test_rank_pages import EMPTY, WHOLE, chain_of, part_of, rank, saved, taken, truth
from tllm.core.errors import ClusterError, WeightsError
from tllm.engine.page_store import remote_pages
from tllm.engine.page_store.page_file import check_file
from tllm.engine.page_store.page_folder import Box, PageFolder
from tllm.engine.page_store.remote_pages import RemotePages, overlap

FIRST, LAST = (range(1), (0, 4)), (range(1, 3), (0, 4))


class Elsewhere:
    """Another node's folder. `asked` are the files that it gave; it may be gone, or give `wrong` bytes."""

    def __init__(self, path: Path) -> None:
        self.folder = PageFolder(path / "pages", "model", 1 << 20)
        self.asked: list[tuple[bytes, Box]] = []
        self.is_gone = False
        self.wrong: bytes | None = None

    def find(self, names: Sequence[bytes]) -> list[tuple[Box, ...]]:
        if self.is_gone:
            raise ClusterError("gone")
        self.folder.scan()
        return [self.folder.boxes(name) for name in names]

    def names(self) -> set[bytes]:
        self.find([])
        return set(self.folder.names())

    def get(self, name: bytes, box: Box) -> bytes:
        self.asked.append((name, box))
        return self.folder.path(name, box).read_bytes() if self.wrong is None else self.wrong


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_pages, "IDLE_SECONDS", 0.001)
    monkeypatch.setattr(remote_pages, "LEARN_SECONDS", (0.0, 0.01, 0.01))


def test_what_a_plan_needs_is_brought_and_nothing_else(tmp_path: Path) -> None:
    saved(tmp_path / "a", truth(1), chain_of(), FIRST)
    saved(tmp_path / "b", truth(1), chain_of(), LAST, (range(3), (0, 1)))
    other = Elsewhere(tmp_path / "b")
    with rank(tmp_path / "a", part_of(EMPTY, range(2), (0, 4))) as pages:
        assert taken(pages, chain_of()) == 0
        pages.others = RemotePages(pages.folder, [other], None, lambda: 0)
        assert taken(pages, chain_of()) == 3
        assert {box for _, box in other.asked} == {Box(1, 3, 0, 4), Box(0, 3, 0, 1)}
        num_asked = len(other.asked)
        assert taken(pages, chain_of()) == 3 and len(other.asked) == num_asked, "they are here now"


def test_a_rank_that_begins_with_nothing_knows_what_others_have(tmp_path: Path) -> None:
    other = Elsewhere(tmp_path / "b")
    with rank(tmp_path / "a", part_of(EMPTY, *WHOLE)) as pages:
        pages.others = RemotePages(pages.folder, [other], None, lambda: 0)
        saved(tmp_path / "b", truth(1), chain_of(), WHOLE)  # by a node that begins a little later
        until(lambda: pages.may_have(b"a" * 32))
        assert not pages.keeps(b"a" * 32) and taken(pages, chain_of()) == 3
        assert pages.keeps(b"a" * 32)


def test_what_others_give_is_checked(tmp_path: Path) -> None:
    saved(tmp_path / "b", truth(1), chain_of(), WHOLE)
    saved(tmp_path / "c", truth(1), chain_of(), LAST)
    other, held = Elsewhere(tmp_path / "b"), part_of(EMPTY, *WHOLE)
    good = other.folder.path(b"a" * 32, Box(0, 3, 0, 4)).read_bytes()
    with rank(tmp_path / "a", held) as pages:
        pages.others = RemotePages(pages.folder, [other], None, lambda: 0)
        neighbour = other.folder.path(b"b" * 32, Box(0, 3, 0, 4)).read_bytes()
        part = Elsewhere(tmp_path / "c").folder.path(b"a" * 32, Box(1, 3, 0, 4)).read_bytes()
        for wrong in (b"", good[:-1] + b"?", neighbour, part):
            other.wrong = wrong
            assert taken(pages, chain_of()) == 0
        assert not pages.folder.names(), "nothing of it is kept"
        other.wrong, other.is_gone = None, True
        assert taken(pages, chain_of()) == 0
        other.is_gone = False
        assert taken(pages, chain_of()) == 3
    with pytest.raises(WeightsError, match=r"what came holds layers and kv heads 1-3\.0-4, and 0-3\.0-4 of that page"):
        check_file(part, "model", b"a" * 32, Box(0, 3, 0, 4), "what came")


def test_what_the_node_before_saves_is_copied_when_there_is_time(tmp_path: Path) -> None:
    before, busy = Elsewhere(tmp_path / "b"), threading.Event()
    busy.set()
    steps = iter(range(10**9))
    folder = PageFolder(tmp_path / "a" / "pages", "model", 1 << 20)
    others = RemotePages(folder, [before], before, lambda: next(steps) if busy.is_set() else -5)
    chain = chain_of()
    others.saved(chain.names)  # which its writer has yet to write
    saved(tmp_path / "b", truth(1), chain, LAST)
    busy.clear()
    until(lambda: len(folder.names()) == 3)
    with rank(tmp_path / "a", part_of(EMPTY, *LAST)) as pages:
        assert taken(pages, chain) == 3
    assert len(before.asked) == 3
    others.close()


def test_a_folder_that_two_nodes_share_is_copied_by_nobody(tmp_path: Path) -> None:
    folder = PageFolder(tmp_path / "pages", "model", 1 << 20)
    other = Elsewhere(tmp_path)
    saved(tmp_path, truth(1), chain_of(), LAST)
    others = RemotePages(folder, [other], other, lambda: 0)
    others.bring(chain_of().names, Box(1, 3, 0, 4))
    others.saved(chain_of().names)
    others.close()
    assert not other.asked and len(folder.names()) == 3


def test_overlaps() -> None:
    assert overlap(Box(0, 2, 0, 2), Box(1, 3, 1, 3))
    assert not overlap(Box(0, 2, 0, 2), Box(2, 3, 0, 2))
    assert not overlap(Box(0, 2, 0, 2), Box(0, 2, 2, 4))
