"""Pages of the KV cache between nodes: what a chunk server says of those on its disk, and `PageExchange`, which asks.

They travel as the files that they are, over the chunk servers' connections (mutual TLS between nodes of one cluster).
A node gives only files of the model that it serves, and only those that its index lists, so no path comes from outside.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from tllm.cluster.channel import Channel
from tllm.cluster.messages import Message, RankAddress
from tllm.cluster.weight_messages import FindPages, GetPage, ListPages, PageNames, PagesFound
from tllm.core.errors import ClusterError, WeightsError
from tllm.engine.page_store.page_folder import Box, PageFolder
from tllm.engine.page_store.remote_pages import FILE_BYTES

T = TypeVar("T")

NAMES_AT_ONCE = 4096
MAX_NAMES = 1 << 20
"""Of one node, at most."""

ASK_SECONDS = 3.0
GET_SECONDS = 10.0


def boxes_of(pages: PageFolder | None, wanted: FindPages) -> PagesFound:
    """What there is of some pages; nothing where another model is served, or none."""
    if pages is None or pages.folder.name != wanted.model:
        return PagesFound(((),) * len(wanted.names))
    return PagesFound(tuple(tuple(tuple(box) for box in pages.boxes(name)) for name in wanted.names))  # type: ignore[misc]


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


class NodeChannels(Protocol):
    """Does work over a connection to another node (`ChunkFetcher`)."""

    def with_node(self, place: RankAddress, work: Callable[[Channel], Coroutine[Any, Any, T]], seconds: float) -> T: ...


class PageExchange:
    """The disk of one other node, for the threads of a rank: a `RemoteDisk`."""

    def __init__(self, channels: NodeChannels, place: RankAddress, model: str) -> None:
        self._channels, self._place, self._model = channels, place, model

    def find(self, names: Sequence[bytes]) -> list[tuple[Box, ...]]:
        """What it has of each of these pages. ClusterError where it does not say."""

        async def ask(channel: Channel) -> PagesFound:
            answer = await channel.ask(FindPages(self._model, tuple(names)), ASK_SECONDS)
            assert isinstance(answer, PagesFound)
            return answer

        found = self._channels.with_node(self._place, ask, ASK_SECONDS).boxes
        if len(found) != len(names):
            raise ClusterError(f"{self._place.node} told of {len(found)} pages and was asked for {len(names)}")
        return [tuple(Box(*box) for box in boxes) for boxes in found]

    def names(self) -> set[bytes]:
        """The names of all pages that it has something of."""

        async def ask(channel: Channel) -> set[bytes]:
            names = set[bytes]()
            async with aclosing(channel.stream(ListPages(self._model), ASK_SECONDS)) as answers:
                async for answer in answers:
                    names.update(answer.names)
                    if len(names) > MAX_NAMES:
                        break
            return names

        return self._channels.with_node(self._place, ask, GET_SECONDS)

    def get(self, name: bytes, box: Box) -> bytes:
        """The bytes of a file, as they came. ClusterError or WeightsError where they do not."""

        async def ask(channel: Channel) -> bytes:
            out = bytearray()
            async with aclosing(
                channel.stream(GetPage(self._model, name, (box[0], box[1], box[2], box[3])), ASK_SECONDS)
            ) as pieces:
                async for piece in pieces:
                    out += piece.data
                    if len(out) > FILE_BYTES:
                        raise WeightsError(f"{self._place.node} gave more than {FILE_BYTES} bytes for a page")
            return bytes(out)

        return self._channels.with_node(self._place, ask, GET_SECONDS)
