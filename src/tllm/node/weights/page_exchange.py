"""`PageExchange`: asks another node's chunk server for pages of the KV cache on its disk.

They travel as the files that they are, over the chunk servers' connections (mutual TLS between nodes of one cluster).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from tllm.cluster.channel import Channel
from tllm.cluster.messages import RankAddress
from tllm.cluster.weight_messages import FindPages, GetPage, ListPages, PagesFound
from tllm.core.errors import ClusterError, WeightsError
from tllm.engine.page_store.page_folder import Box
from tllm.engine.page_store.remote_pages import FILE_BYTES
from tllm.node.weights.chunk_server import receive_bytes

T = TypeVar("T")

MAX_NAMES = 1 << 20
"""Of one node, at most."""

ASK_SECONDS = 3.0
GET_SECONDS = 10.0


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
            answer: PagesFound = await channel.ask(FindPages(self._model, tuple(names)), ASK_SECONDS)
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
        wanted = GetPage(self._model, name, box)
        content = self._channels.with_node(
            self._place, lambda channel: receive_bytes(channel, wanted, FILE_BYTES, ASK_SECONDS), GET_SECONDS
        )
        if len(content) > FILE_BYTES:
            raise WeightsError(f"{self._place.node} gave more than {FILE_BYTES} bytes for a page")
        return content
