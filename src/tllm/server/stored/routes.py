"""`ReplyRoutes`: posts requests for replies, and takes up, cancels and deletes the replies that are kept.

Each interface prepares its own replies (`Prepare`); what becomes of a client that goes away is the same for all. A
request that may be taken up is run by the `StreamStore`, and every reader, the first one too, makes its events of the
outputs that are kept there. So a reply that is taken up, from whichever machine, has the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from tllm.core.errors import RequestError
from tllm.server.http.auth import key_of
from tllm.server.http.errors import MESSAGES, HttpError, draining
from tllm.server.http.query import number_of
from tllm.server.http.routed import Endpoint, json_reply, routes
from tllm.server.http.sse import EventStream, ended_by_error
from tllm.server.openai.prepared_reply import Prepare, PreparedReply
from tllm.server.reply.reply_ids import ReplyIds
from tllm.server.stored.replay import Replay, numbered
from tllm.server.stored.stream_store import StreamStore, TakenStream, no_room
from tllm.spec.request import StreamRecord

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
LAST_EVENT_ID = "last-event-id"


class ReplyKind(NamedTuple):
    """How replies of a path are called: what stands before their ids, and the `object` of a deleted one."""

    prefix: str
    deleted: str


KINDS: Mapping[str, ReplyKind] = {
    COMPLETIONS: ReplyKind("cmpl-", "text_completion.deleted"),
    CHAT: ReplyKind("chatcmpl-", "chat.completion.deleted"),
    RESPONSES: ReplyKind("resp_", "response"),
    MESSAGES: ReplyKind("msg_", "message_deleted"),
}

MakeStream = Callable[[AsyncGenerator[bytes, None], PreparedReply], EventStream]
"""A reply of events, as the server sends them."""


class ReplyRoutes:
    """The routes of each path in `prepare`."""

    def __init__(self, prepare: Mapping[str, Prepare], store: StreamStore, stream: MakeStream) -> None:
        self._prepare, self._store, self._stream = prepare, store, stream

    def table(self) -> list[Route]:
        """Posting, and what can be done with a reply by its id."""
        return [
            *routes("POST", {f"{RESPONSES}/{{id}}/cancel": _on(RESPONSES, self._cancel)}),
            *routes("POST", {path: _on(path, self._post) for path in self._prepare}),
            *routes("GET", {f"{path}/{{id}}": _on(path, self._get) for path in self._prepare}),
            *routes("DELETE", {f"{path}/{{id}}": _on(path, self._delete) for path in self._prepare}),
        ]

    async def _post(self, path: str, http: HttpRequest) -> Response:
        body = await http.body()
        reply = await self._prepare[path](body, http.scope, ReplyIds())
        if reply.may_be_taken_up and self._store.is_on:
            return await self._post_stored(path, reply, body, key_of(http.scope))
        return self._stream(reply.events(), reply) if reply.is_stream else json_reply(await reply.whole())

    async def _post_stored(self, path: str, reply: PreparedReply, body: bytes, owner: str) -> Response:
        """Have the store run it, and be its first reader."""
        job, options = reply.job, reply.job.choices[0].options
        record = StreamRecord(
            id=KINDS[path].prefix + job.ids.stem,
            body=body,
            owner=owner,
            created=job.ids.created,
            stops=options.stops,
            include_stop_str_in_output=options.include_stop_str_in_output,
            skip_special_tokens=options.skip_special_tokens,
        )
        if job.router.draining:
            raise draining()
        await self._store.open(record, [choice.request for choice in job.choices], job.account)
        taken = await self._store.take_up(record.id, owner)
        if taken is None:
            raise no_room()
        is_told_now = reply.is_background and not reply.is_stream
        job.outputs = Replay(taken, until_now=is_told_now).outputs()
        if reply.is_stream:
            stream = self._stream(_events(path, reply), reply)
            stream.headers["content-location"] = f"{path}/{record.id}"
            return stream
        return json_reply(await (reply.state if reply.state is not None and is_told_now else reply.whole)())

    async def _get(self, path: str, http: HttpRequest) -> Response:
        is_stream, after, name = _asked(path, http)
        taken = await self._find(path, http)
        replay = Replay(taken, until_now=path == RESPONSES and not is_stream)
        reply = await self._again(path, http, replay)
        if not is_stream:
            return json_reply(await (reply.state or reply.whole)())
        events = replay.events_after(_events(path, reply), after, name)
        if taken.is_over:  # nothing more will come, and an `EventSource` that has all is to know it
            first = await anext(events, None)
            if first is None:
                return Response(status_code=204)
            events = _joined(first, events)
        return self._stream(events, reply)

    async def _cancel(self, path: str, http: HttpRequest) -> Response:
        await self._end(path, http, forget=False)
        reply = await self._again(path, http, Replay(await self._find(path, http), until_now=True))
        assert reply.state is not None, "only responses can be cancelled by that path"
        return json_reply(await reply.state())

    async def _delete(self, path: str, http: HttpRequest) -> Response:
        await self._end(path, http, forget=True)
        return json_reply({"id": http.path_params["id"], "object": KINDS[path].deleted, "deleted": True})

    async def _again(self, path: str, http: HttpRequest, replay: Replay) -> PreparedReply:
        """A reply that is kept, ready to be made once more."""
        record = replay.record
        reply = await self._prepare[path](record.body, http.scope, ReplyIds(record.stem, record.created, is_again=True))
        reply.job.outputs = replay.outputs()
        return reply

    async def _find(self, path: str, http: HttpRequest) -> TakenStream:
        taken = await self._store.take_up(_id(path, http), key_of(http.scope))
        if taken is None:
            raise _unknown(http)
        return taken

    async def _end(self, path: str, http: HttpRequest, forget: bool) -> None:
        if not await self._store.end(_id(path, http), key_of(http.scope), forget):
            raise _unknown(http)


def _on(path: str, act: Callable[[str, HttpRequest], Awaitable[Response]]) -> Endpoint:
    async def endpoint(http: HttpRequest) -> Response:
        return await act(path, http)

    return endpoint


def _events(path: str, reply: PreparedReply) -> AsyncGenerator[bytes, None]:
    """The events of a reply that is kept, an error's too. Those of responses have numbers of their own."""
    events = ended_by_error(reply.events(), reply.failed)
    return events if path == RESPONSES else numbered(events)


async def _joined(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        yield first
        async for event in rest:
            yield event


def _asked(path: str, http: HttpRequest) -> tuple[bool, int, str]:
    """Whether events are asked for, after which number, and by what name that was given."""
    accepts = "text/event-stream" in http.headers.get("accept", "")
    is_stream = http.query_params.get("stream", "").lower() in ("true", "1") or accepts
    after, given = number_of(http, "starting_after"), http.headers.get(LAST_EVENT_ID)
    if given is None:
        return is_stream or after >= 0, after, "starting_after"
    if not re.fullmatch(r"\d{1,18}", given, re.ASCII) or path == RESPONSES:
        is_ours = "" if path != RESPONSES else "; events of responses have a sequence_number: use starting_after"
        raise RequestError(f"Last-Event-ID is {given[:50]!r}, which is no id of an event of ours{is_ours}")
    return True, int(given), "Last-Event-ID"


def _id(path: str, http: HttpRequest) -> str:
    """The id that is asked for; HttpError for what cannot be one of that path's."""
    name: str = http.path_params["id"]
    if not re.fullmatch(rf"{KINDS[path].prefix}[0-9a-f]{{32}}", name):
        raise _unknown(http)
    return name


def _unknown(http: HttpRequest) -> HttpError:
    name = http.path_params["id"][:100]
    message = (
        f"there is no reply {name!r} that this key may take up: only those are kept that asked for it "
        "(store: true), and only for a while after their end"
    )
    return HttpError(404, message, "not_found_error", "not_found", "id")
