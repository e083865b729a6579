"""Server-sent events: chunks as they come, an error as an event, and comments while there is nothing to send."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tllm.core.errors import TllmError
from tllm.server.http.errors import as_http, body_of

_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"

POLL_SECONDS = 0.5
"""How often a stream without events looks whether a comment is due."""

REASON_AFTER_SECONDS, REASON_AGAIN_SECONDS = 1.0, 3.0
"""A stream without events for the first says in a comment what it waits for, and again after the second."""


ErrorEvents = Callable[[TllmError], Iterable[bytes]]
"""error_events(error): the events with which an error ends a stream"""


async def events(chunks: AsyncGenerator[msgspec.Struct, None]) -> AsyncGenerator[bytes, None]:
    """The events of a stream of OpenAI's interface."""
    encode = msgspec.json.Encoder().encode
    async with aclosing(chunks):
        async for chunk in chunks:
            yield b"data: " + encode(chunk) + b"\n\n"
    yield DONE


async def ended_by_error(events: AsyncGenerator[bytes, None], error_events: ErrorEvents) -> AsyncGenerator[bytes, None]:
    """The same events; after an error among them, those of the error. One before the first event is raised: it can
    still be an ordinary reply."""
    has_begun = False
    async with aclosing(events):
        try:
            async for event in events:
                has_begun = True
                yield event
        except TllmError as error:
            if not has_begun:
                raise
            for event in error_events(error):
                yield event


def named_event(event: Mapping[str, Any]) -> bytes:
    """An event that is called as its `type` says, for interfaces whose events have names."""
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


def last_error(error: TllmError) -> tuple[bytes, bytes]:
    """How an error ends a stream of `events`."""
    return b"data: " + body_of(as_http(error)) + b"\n\n", DONE


class EventStream(Response):
    """A reply of events. Headers go out with the first event, or after `keep_alive_seconds` without one.

    A stream that is silent for so long sends a comment, and none for 0. `waiting` says in words what is waited for, or
    nothing; it is sent as a comment, too, which clients ignore and people can read. An error before the headers is
    raised, and can still be an ordinary reply; a later one ends the stream with its `error_events`.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        keep_alive_seconds: float,
        waiting: Callable[[], str],
        error_events: ErrorEvents,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._source = source
        self._keep_alive_seconds = keep_alive_seconds or math.inf
        self._waiting = waiting
        self._error_events = error_events
        self._sent, self._reason_sent = time.monotonic(), -math.inf
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all. Cancelled when the client goes away, which closes the source and so the engine's work."""
        first = asyncio.ensure_future(anext(self._source, b""))
        ping: asyncio.Task[None] | None = None
        try:
            comment = await self._comment(first)
            early = comment or first.result()  # an error raised here is an ordinary reply
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send(send, early)
            ping = asyncio.create_task(self._comments(send))
            try:
                if comment:
                    await self._send(send, await first)
                async for event in self._source:
                    await self._send(send, event)
            except TllmError as error:
                await self._send(send, b"".join(self._error_events(error)))
            await _stopped(ping)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await _stopped(ping)
            await _stopped(first)
            await self._source.aclose()

    async def _send(self, send: Send, data: bytes) -> None:
        async with self._sending:
            self._sent = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _comments(self, send: Send) -> None:
        never = asyncio.get_running_loop().create_future()
        while True:
            await self._send(send, await self._comment(never))

    async def _comment(self, event: asyncio.Future[bytes]) -> bytes:
        """The next comment, once one is due; b"" if the event came first."""
        while not event.done():
            now = time.monotonic()
            if (
                now - self._sent >= REASON_AFTER_SECONDS
                and now - self._reason_sent >= REASON_AGAIN_SECONDS
                and (words := self._waiting())
            ):
                self._reason_sent = now
                return f": {' '.join(words.split())}\n\n".encode()
            if now - self._sent >= self._keep_alive_seconds:
                return COMMENT
            await asyncio.wait(
                {event}, timeout=max(0.001, min(POLL_SECONDS, self._sent + self._keep_alive_seconds - now))
            )
        return b""


async def _stopped(task: asyncio.Future[bytes] | asyncio.Task[None] | None) -> None:
    if task is not None and not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
