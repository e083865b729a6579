"""Pages between nodes: only files of the model that is served, and no more than a page may have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tllm.cluster.messages import Message, RankAddress
from tllm.cluster.weight_messages import ChunkBytes, FindPages, GetPage, ListPages, PagesFound
from tllm.core.errors import ClusterError, WeightsError
from tllm.engine.page_store.page_folder import Box, PageFolder
from tllm.node.weights import chunk_server, page_exchange
from tllm.node.weights.chunk_server import boxes_of, file_of, names_of
from tllm.node.weights.page_exchange import PageExchange

BOX, NAME, CONTENT = Box(0, 4, 0, 2), b"n" * 32, b"content"


class Answers:
    """A connection whose other end is here: it has a folder, or says what it is told to."""

    def __init__(self, pages: PageFolder | None, told: Message | None = None) -> None:
        self.pages, self.told = pages, told

    def with_node(self, place: RankAddress, work: Callable[[Any], Coroutine[Any, Any, Any]], seconds: float) -> Any:
        assert place.node == "b"
        return asyncio.run(work(self))

    async def ask(self, message: FindPages, deadline: float) -> Message:
        return self.told or boxes_of(self.pages, message)

    async def stream(self, message: Message, deadline: float) -> AsyncGenerator[Message, None]:
        if isinstance(message, ListPages):
            async for names in names_of(self.pages, message):
                yield names
        elif isinstance(message, GetPage):
            while self.told is not None:
                yield self.told
            yield ChunkBytes(file_of(self.pages, message))


@pytest.fixture
def pages(tmp_path: Path) -> PageFolder:
    made = PageFolder(tmp_path / "pages", "model", 1 << 20)
    assert made.write(NAME, BOX, len(CONTENT), lambda file: file.write(CONTENT) and None)
    return made


def exchange(pages: PageFolder | None, model: str = "model", told: Message | None = None) -> PageExchange:
    return PageExchange(Answers(pages, told), RankAddress("b", "host", 1, 2), model)


def test_what_a_node_has_is_found_listed_and_given(pages: PageFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_server, "NAMES_AT_ONCE", 2)
    more = [bytes([n]) * 32 for n in range(5)]
    for name in more:
        pages.write(name, BOX, 1, lambda file: file.write(b"x") and None)
    other = exchange(pages)
    assert other.find([NAME, b"m" * 32]) == [(BOX,), ()]
    assert other.names() == {NAME, *more}
    assert other.get(NAME, BOX) == CONTENT


def test_nothing_is_given_of_another_model_or_that_is_not_listed(pages: PageFolder) -> None:
    for other in (exchange(pages, "other"), exchange(None)):
        assert other.find([NAME]) == [()] and other.names() == set()
        with pytest.raises(WeightsError, match="not here"):
            other.get(NAME, BOX)
    for name, box in ((NAME, Box(0, 4, 0, 3)), (b"m" * 32, BOX), (b"../" * 10, BOX), (NAME, Box(-1, 4, 0, 2))):
        with pytest.raises(WeightsError, match="not here"):
            exchange(pages).get(name, box)
    pages.path(NAME, BOX).unlink()
    with pytest.raises(WeightsError, match="not here any more"):
        exchange(pages).get(NAME, BOX)


def test_answers_that_are_too_much_or_too_few(pages: PageFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_exchange, "FILE_BYTES", 100)
    with pytest.raises(WeightsError, match="more than 100 bytes"):
        exchange(pages, told=ChunkBytes(bytes(30))).get(NAME, BOX)
    with pytest.raises(ClusterError, match="told of 0 pages and was asked for 1"):
        exchange(pages, told=PagesFound(())).find([NAME])
