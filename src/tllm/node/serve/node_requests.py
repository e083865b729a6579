"""`NodeRequests`: the coordinator's side of HTTP servers on nodes: their requests, and the replies that are stored."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from tllm.cluster.channel import Act
from tllm.cluster.http_messages import (
    AskEngine,
    EndStream,
    EngineReport,
    FollowStream,
    OpenStream,
    ServedModel,
    ServesHttp,
    StreamEnded,
    StreamFound,
    StreamOpened,
)
from tllm.cluster.messages import Cancel, Message, Outputs, Submit
from tllm.core.errors import ClusterError, TllmError
from tllm.core.tasks import end_tasks
from tllm.server.admission.account import Account, ApiKey, Charge
from tllm.server.http.errors import HttpError
from tllm.server.openai.engine_client import RequestRouter
from tllm.server.openai.lora_adapters import NoAdapters, ServedAdapters
from tllm.server.stored.stream_store import StreamStore, size_of
from tllm.spec.request import Output

log = logging.getLogger("tllm.node")

NODES = "nodes"
"""Whom the first machine's metrics name for requests of other nodes' servers, where each key has its own account."""

OPEN_SECONDS = 30.0
"""How long a request waits for a coordinator that is not ready."""

MOST_OUTPUTS = 256
"""In one message, where many are there at once."""

MOST_UNWANTED = 1024
"""Names that were cancelled and are not read, the newest. Most have just ended; the others have not begun yet."""


class NodeRequests:
    """What nodes ask for whose HTTP servers answer requests, from when it is open to them.

    `post(node, message)` sends to a node. Their requests count among what the first machine's server has in hand, and
    are refused when that drains, unless another process takes its place. A node that is lost waits for nothing any
    more: its requests are cancelled, but for those of replies that may be taken up.
    """

    def __init__(self, post: Callable[[str, Message], None]) -> None:
        self._post = post
        self._account = Account(ApiKey(NODES, b""), time.monotonic)
        self._opened = asyncio.Event()
        self._asked: set[str] = set()  # nodes with HTTP servers, which are to hear of the model
        self._model: ServedModel | None = None
        self._router: RequestRouter | None = None
        self._store: StreamStore | None = None
        self._adapters: ServedAdapters = NoAdapters()
        self._reading: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._unwanted: dict[tuple[str, str], None] = {}

    def open(
        self, model: ServedModel, router: RequestRouter, store: StreamStore, adapters: ServedAdapters | None = None
    ) -> None:
        """The first machine's server is there."""
        self._model, self._router, self._store = model, router, store
        self._adapters = adapters or self._adapters
        self._opened.set()
        for node in self._asked:
            self._post(node, model)

    def acts(self, node: str) -> Mapping[type, Act]:
        """What to do with a node's messages."""

        async def serves(_: ServesHttp) -> None:
            self._asked.add(node)
            if self._model is not None:
                self._post(node, self._model)

        async def report(_: AskEngine) -> EngineReport:
            client = self._open_router().client
            status, health = msgspec.json.encode(client.status()), msgspec.json.encode(client.health())
            adapters = {name: (self._adapters.id_of(name), path) for name, path in self._adapters.paths.items()}
            return EngineReport(dict(client.stats()), status, health, adapters)

        def submit(message: Submit) -> AsyncGenerator[Message, None]:
            return self._submit(node, message)

        async def cancel(message: Cancel) -> None:
            self._cancel((node, message.request_id))

        async def open_stream(message: OpenStream) -> StreamOpened:
            try:
                await self._open_store().open(message.record, message.requests, self._account)
            except HttpError as error:
                raise _busy(error) from error
            return StreamOpened()

        def follow(message: FollowStream) -> AsyncGenerator[Message, None]:
            return self._follow(node, message)

        async def end(message: EndStream) -> StreamEnded:
            return StreamEnded(await self._open_store().end(message.stream_id, message.owner, message.forget))

        return {
            ServesHttp: serves,
            AskEngine: report,
            Submit: submit,
            Cancel: cancel,
            OpenStream: open_stream,
            FollowStream: follow,
            EndStream: end,
        }

    def _cancel(self, name: tuple[str, str]) -> None:
        """End what is read under this name, or what will be: the task of a question may begin after its cancellation
        has come, or wait for the coordinator."""
        if (reading := self._reading.get(name)) is not None:
            reading.cancel()
            return
        self._unwanted[name] = None
        if len(self._unwanted) > MOST_UNWANTED:
            del self._unwanted[next(iter(self._unwanted))]

    async def _submit(self, node: str, message: Submit) -> AsyncGenerator[Message, None]:
        await self._until_open()
        router = self._open_router()
        try:
            with router.admit(1, self._account, *size_of([message.request]), lasting=True) as charge:
                outputs = router.client.submit(message.request)
                async with aclosing(self._read(node, message.request.id, outputs)) as answers:
                    async for answer in answers:
                        for output in answer.outputs:
                            _use(charge, output)
                        yield answer
        except HttpError as error:
            raise _busy(error) from error

    async def _follow(self, node: str, message: FollowStream) -> AsyncGenerator[Message, None]:
        await self._until_open()
        taken = await self._open_store().take_up(message.stream_id, message.owner)
        if taken is None:
            yield StreamFound()
            return
        yield StreamFound(taken.record, taken.seen, taken.is_over)
        async with aclosing(self._read(node, message.follower, taken.outputs)) as answers:
            async for answer in answers:
                yield answer

    async def _read(self, node: str, name: str, source: AsyncGenerator[Output, None]) -> AsyncGenerator[Outputs, None]:
        """The outputs of a source, until it ends or the node cancels that name, as it may have done already."""
        if (node, name) in self._unwanted:
            del self._unwanted[node, name]
            return
        arrived: asyncio.Queue[Output | TllmError | None] = asyncio.Queue()

        async def read() -> None:
            try:
                async with aclosing(source):
                    async for output in source:
                        arrived.put_nowait(output)
            except TllmError as error:
                arrived.put_nowait(error)

        reading = self._reading[node, name] = asyncio.create_task(read(), name=f"{name} for {node}")
        reading.add_done_callback(lambda done: arrived.put_nowait(_fault(done)))
        try:
            ended = False
            while not ended:
                some: list[Any] = [await arrived.get()]
                while not arrived.empty() and len(some) < MOST_OUTPUTS:
                    some.append(arrived.get_nowait())
                ended = not isinstance(some[-1], Output)
                outputs = tuple(one for one in some if isinstance(one, Output))
                if outputs:
                    yield Outputs(0, outputs)
                for error in some:
                    if isinstance(error, TllmError):
                        raise error
        finally:
            if self._reading.get((node, name)) is reading:  # and not another one's of that name
                del self._reading[node, name]
            await end_tasks(reading)

    async def _until_open(self) -> None:
        """A coordinator that has just taken another's place is not ready at once."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_SECONDS):
                await self._opened.wait()

    def _open_router(self) -> RequestRouter:
        if self._router is None:
            raise ClusterError("the cluster serves no requests yet", "ask again")
        return self._router

    def _open_store(self) -> StreamStore:
        if self._store is None:
            raise ClusterError("the cluster serves no requests yet", "ask again")
        return self._store


def _fault(reading: asyncio.Task[None]) -> ClusterError | None:
    """What reading ended with that is no error for users: a reply that lacks its end is not given for a whole one."""
    error = None if reading.cancelled() else reading.exception()
    if error is None:
        return None
    log.error("%s failed", reading.get_name(), exc_info=error)
    return ClusterError(f"{type(error).__name__}: {error}", "this is a fault of tllm or of the machine")


def _use(charge: Charge, output: Output) -> None:
    if output.computed_tokens:
        charge.compute(output.request_id, output.computed_tokens)
    elif output.token_ids or output.pooled:  # not the end of one that waited too long
        charge.use(charge.generated + len(output.token_ids), charge.cached + output.cached_tokens)


def _busy(error: HttpError) -> ClusterError:
    """The first machine takes no more, or ends: another time, or at another node."""
    return ClusterError(error.message, "ask again later")
