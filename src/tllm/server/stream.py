"""Server-sent events: chunks as they come, an error as an event, a comment when it is quiet for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tllm.ground.errors import TllmError
from tllm.server.errors import as_http, body_of

_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"


async def events(chunks: AsyncGenerator[msgspec.Struct, None]) -> AsyncGenerator[bytes, None]:
    """The events of a stream. An error before the first chunk is raised: it can still be an ordinary reply."""
    encode = msgspec.json.Encoder().encode
    begun = False
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                begun = True
                yield b"data: " + encode(chunk) + b"\n\n"
        except TllmError as error:
            if not begun:
                raise
            yield b"data: " + body_of(as_http(error)) + b"\n\n"
    yield DONE


class EventStream(Response):
    """A reply of events. Headers go out with the first event, or after `quiet` seconds without one."""

    def __init__(self, source: AsyncGenerator[bytes, None], quiet: float) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._source = source
        self._quiet = quiet
        self._sent = 0.0
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all. Cancelled when the client goes away, which closes the source and so the engine's work."""
        first = asyncio.ensure_future(anext(self._source, b""))
        ping: asyncio.Task[None] | None = None
        try:
            await asyncio.wait({first}, timeout=self._quiet)
            early = first.result() if first.done() else COMMENT  # an error raised here is an ordinary reply
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send(send, early)
            ping = asyncio.create_task(self._comments(send))
            if early is COMMENT:
                await self._late(first, send)
            async for event in self._source:
                await self._send(send, event)
            await _stopped(ping)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await _stopped(ping)
            await _stopped(first)
            await self._source.aclose()

    async def _late(self, first: asyncio.Future[bytes], send: Send) -> None:
        """The first event when headers are already out: its error can only be an event now."""
        try:
            await self._send(send, await first)
        except TllmError as error:
            await self._send(send, b"data: " + body_of(as_http(error)) + b"\n\n" + DONE)

    async def _send(self, send: Send, data: bytes) -> None:
        async with self._turn:
            self._sent = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _comments(self, send: Send) -> None:
        while True:
            await asyncio.sleep(max(0.001, self._sent + self._quiet - time.monotonic()))
            if time.monotonic() - self._sent >= self._quiet:
                await self._send(send, COMMENT)


async def _stopped(task: asyncio.Future[bytes] | asyncio.Task[None] | None) -> None:
    if task is not None and not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
