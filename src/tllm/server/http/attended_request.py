"""`Attended`: reads a request's body within limits, gives it an id, and cancels its work when the client leaves."""

from __future__ import annotations

import asyncio
import re
import uuid
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tllm.server.http.errors import HttpError, draining, reply_of
from tllm.server.http.settings import ServerSettings

_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")
_CLOSE = {"connection": "close"}


class _Gone(Exception):
    """The client went away before its request was whole."""


class Attended:
    """Wraps all routes: whatever a route does ends when its client leaves, or after `request_seconds`."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._max_body_bytes = settings.max_body_bytes
        self._body_seconds = settings.body_seconds
        self._seconds = settings.request_seconds
        self._in_work: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """Cancel everything in work: the server ends now. Who has had no reply yet gets a 503."""
        for work in self._in_work:
            work.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then run the route and watch the client at the same time."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        outgoing = _Outgoing(send, _request_id(scope))
        try:
            body = await self._body(scope, receive)
        except _Gone:
            return
        except HttpError as error:
            await reply_of(error, scope["path"])(scope, receive, outgoing)
            return
        work = asyncio.create_task(self._work(scope, body, outgoing))
        watch = asyncio.create_task(_until_gone(receive))
        self._in_work.add(work)
        work.add_done_callback(self._in_work.discard)
        try:
            await asyncio.wait({work, watch}, timeout=self._seconds or None, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, watch):
                task.cancel()
            stopped, late = work.cancelled(), not work.done() and not watch.done()
            with suppress(asyncio.CancelledError):
                await work
            with suppress(asyncio.CancelledError):
                await watch
        if (stopped or late) and not outgoing.started:
            slow = HttpError(504, f"no reply within {self._seconds:g} s", "server_error", "deadline", headers=_CLOSE)
            await reply_of(draining() if stopped else slow, scope["path"])(scope, receive, outgoing)

    async def _work(self, scope: Scope, body: bytes, send: Send) -> None:
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()  # the one who watches for the end is outside
            raise AssertionError

        await self._app(scope, receive, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        declared = next((value for key, value in scope["headers"] if key == b"content-length"), b"0")
        if declared.isdigit() and len(declared) < 20 and int(declared) > self._max_body_bytes:
            raise self._too_large(int(declared))
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._body_seconds or None):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._max_body_bytes:
                        raise self._too_large(size)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as error:
            text = f"the request's body did not arrive within {self._body_seconds:g} s"
            raise HttpError(408, text, code="body_timeout", headers=_CLOSE) from error

    def _too_large(self, size: int) -> HttpError:
        # the connection stays open: closing it on a client that still sends would lose the reply
        return HttpError(
            413, f"the body has {size} bytes or more, at most {self._max_body_bytes} are taken", code="body_too_large"
        )


class _Outgoing:
    """Sends, remembers whether it has begun, and puts the request's id on the reply."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.started = False
        self._send = send
        self._id = request_id.encode()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            message = {**message, "headers": [*message.get("headers", []), (b"x-request-id", self._id)]}
        await self._send(message)


def _request_id(scope: Scope) -> str:
    for key, value in scope["headers"]:
        text = value.decode("latin-1")
        if key == b"x-request-id" and _ID.match(text):
            return str(text)
    return uuid.uuid4().hex


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
