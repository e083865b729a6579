"""`RemoteEngine` and what goes with it: the cluster's engine, its adapters and its stored replies, as a node's HTTP
server has them."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any, NamedTuple

import msgspec

from tllm.cluster.channel import Gone
from tllm.cluster.http_messages import (
    AskEngine,
    AskSpans,
    EndStream,
    EngineReport,
    FollowStream,
    OpenStream,
    ServedModel,
    StreamEnded,
    StreamFound,
    ToldSpans,
)
from tllm.cluster.messages import Cancel, Submit
from tllm.core.errors import RequestError, TllmError
from tllm.node.front_end.engine_link import EngineLink
from tllm.server.admission.account import Account
from tllm.server.http.errors import rate_limited
from tllm.server.openai.engine_client import Health
from tllm.server.stored.stream_store import TakenStream, size_of
from tllm.server.tracing.tracing import NodeSpan
from tllm.spec.request import Output, Request, StreamRecord

log = logging.getLogger("tllm.node")

RESUME_SECONDS, LOOK_SECONDS = 30.0, 0.05
"""How long a request waits for another coordinator where one is lost, and how often is looked for it."""

REPORT_SECONDS = 0.5
"""How often the coordinator is asked how the engine is; what is told here of it is never older than a second."""


class RemoteEngine:
    """An `EngineClient` whose requests go to the coordinator. `watch` must be running for what it says of itself."""

    def __init__(self, link: EngineLink, model: ServedModel) -> None:
        self.model_name, self.max_model_len = model.model_name, model.max_model_len
        self._link = link
        self._report = EngineReport({}, b"{}", msgspec.json.encode(Health(ready=False, reason="it is not known yet")))

    async def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """The request's outputs as they come; closing this cancels it.

        If the coordinator goes away, the request goes on at the one that takes its place, from the tokens that came.
        The rest is what it would have been, as a token follows from those before it, the request's seed and its place.
        """
        request = request.seeded()
        token_ids = list(request.output_ids)
        until: float | None = None
        for tries in count():
            name = f"{request.id}+{tries}" if tries else request.id
            rest = msgspec.structs.replace(request, id=name, output_ids=tuple(token_ids))
            try:
                async with aclosing(self._submit_once(rest)) as outputs:
                    async for output in outputs:
                        token_ids += output.token_ids
                        until = None
                        yield msgspec.structs.replace(output, request_id=request.id) if tries else output
                return
            except Gone as gone:
                until = until or time.monotonic() + RESUME_SECONDS
                await until_another(self._link, gone, until)

    async def _submit_once(self, request: Request) -> AsyncGenerator[Output, None]:
        ended = False
        try:
            async with aclosing(self._link.answers(Submit(request))) as answers:
                async for answer in answers:
                    for output in answer.outputs:
                        ended = output.finish_reason is not None
                        yield output
            ended = True
        except TllmError:
            ended = True
            raise
        finally:
            if not ended:
                self._link.post(Cancel(request.id))

    def stats(self) -> Mapping[str, float]:
        return self._report.stats

    def status(self) -> Mapping[str, Any]:
        status: dict[str, Any] = msgspec.json.decode(self._report.status)
        return status

    @property
    def adapters(self) -> Mapping[str, tuple[str, str]]:
        """By the names of LoRA adapters: what requests of each carry, and its folder."""
        return self._report.adapters

    def health(self) -> Health:
        return msgspec.json.decode(self._report.health, type=Health)

    async def node_spans(self, traces: Collection[int]) -> list[NodeSpan]:
        """What the ranks have told of what they did for these traces; nothing where no coordinator tells it."""
        try:
            told: ToldSpans = await self._link.ask(AskSpans(tuple(traces)))
        except TllmError as error:
            log.warning("a trace lacks what the ranks did: %s", error.message)
            return []
        return [NodeSpan(*one) for one in told.spans]

    async def watch(self) -> None:
        """Ask how the engine is, for ever."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            await self.refresh()

    async def refresh(self) -> None:
        """Ask how the engine is. Where nobody answers it is not ready."""
        try:
            self._report = await self._link.ask(AskEngine())
        except TllmError as error:
            unwell = Health(ready=False, reason=error.message)
            self._report = msgspec.structs.replace(self._report, health=msgspec.json.encode(unwell))


async def until_another(link: EngineLink, gone: Gone, until: float) -> None:
    """Wait for another coordinator until then at most; after that the loss of the one before is raised."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)  # its loss may be known here before the link is let go
        if link.is_closed or time.monotonic() > until:
            raise gone
        if link.is_attached:
            return


class RemoteAdapters:
    """The adapters of the cluster, as the first machine last told of them, which alone loads and unloads them."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    @property
    def paths(self) -> Mapping[str, str]:
        return {name: path for name, (_, path) in self._engine.adapters.items()}

    def id_of(self, name: str) -> str:
        return self._engine.adapters.get(name, ("", ""))[0]

    async def load(self, name: str, path: str) -> None:
        raise _elsewhere()

    async def unload(self, name: str) -> None:
        raise _elsewhere()


def _elsewhere() -> RequestError:
    return RequestError("this node's server loads and unloads no adapters", "ask the first machine's", "lora_name")


class _Followed(NamedTuple):
    """A stored reply that the coordinator tells of, until `name` is cancelled."""

    name: str
    answers: AsyncGenerator[Any, None]
    found: StreamFound


class RemoteStreamStore:
    """The `StreamStore` of the first machine, asked for by `link`."""

    def __init__(self, link: EngineLink, model: ServedModel) -> None:
        self.is_on = model.keep_streams > 0
        self._link = link

    async def open(self, record: StreamRecord, requests: Sequence[Request], account: Account) -> None:
        """Begin: the requests run to their ends on the first machine's word, whatever becomes of this node.

        The account is charged with what such a reply is expected to take, as its end may not be seen here.
        """
        prompt_tokens, max_tokens = size_of(requests)
        if (refusal := account.refusal(prompt_tokens, max_tokens)) is not None:
            raise rate_limited(refusal)
        with account.charged(len(requests), prompt_tokens, max_tokens) as charge:
            await self._link.ask(OpenStream(record, tuple(requests)))
            charge.use(round(charge.taken) - prompt_tokens, 0)

    async def take_up(self, stream_id: str, owner: str) -> TakenStream | None:
        """The stream from its beginning on; None where there is none that is this owner's."""
        followed = await self._follow(stream_id, owner)
        found = followed.found
        if found.record is None:
            return None
        return TakenStream(found.record, found.seen, found.is_over, self._outputs(stream_id, owner, followed))

    async def end(self, stream_id: str, owner: str, forget: bool) -> bool:
        """Cancel what still runs of it, and with `forget` keep it no more; whether there was such a stream."""
        ended: StreamEnded = await self._link.ask(EndStream(stream_id, owner, forget))
        return ended.found

    async def rest(self, stream_id: str, owner: str, given: int) -> AsyncGenerator[Output, None]:
        """What follows the first outputs of a stream, which another process gave as long as that coordinated."""
        async with aclosing(self._outputs(stream_id, owner, None, given)) as outputs:
            async for output in outputs:
                yield output

    async def _follow(self, stream_id: str, owner: str) -> _Followed:
        follower = uuid.uuid4().hex
        answers = self._link.answers(FollowStream(follower, stream_id, owner))
        found: StreamFound = await anext(answers, StreamFound())
        if found.record is None:
            await answers.aclose()
        return _Followed(follower, answers, found)

    async def _outputs(
        self, stream_id: str, owner: str, followed: _Followed | None, given: int = 0
    ) -> AsyncGenerator[Output, None]:
        """All of a stream. A coordinator that takes the place of a lost one has every output that was given here."""
        follower, until = "", None
        lost = Gone(f"reply {stream_id} is not kept any more")
        try:
            while True:
                try:
                    followed = followed or await self._follow(stream_id, owner)
                    if followed.found.record is None:
                        break
                    follower, place = followed.name, 0
                    async with aclosing(followed.answers) as answers:
                        async for answer in answers:
                            for output in answer.outputs:
                                place += 1
                                if place > given:
                                    given, until = place, None
                                    yield output
                    return
                except Gone as gone:  # which another coordinator may be too
                    lost, followed, until = gone, None, until or time.monotonic() + RESUME_SECONDS
                    await until_another(self._link, gone, until)
            raise lost
        finally:
            if follower:
                self._link.post(Cancel(follower))
