"""`Attended`: reads a request's body within limits, gives it an id, and cancels its work when the client leaves."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tllm.server.http.auth import account_of
from tllm.server.http.errors import HttpError, draining, reply_of, retry_after, too_late
from tllm.server.http.json_size import check_json_size
from tllm.server.http.settings import ServerSettings

_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")
_CLOSE = {"connection": "close"}
GRACE_SECONDS = 2.0
"""A reply that takes too long ends itself (`GenerationJob`) and has this time to say so, before it is cut off here."""


class _Gone(Exception):
    """The client went away before its request was whole."""


class Attended:
    """Wraps all routes: whatever a route does ends when its client leaves, or after `request_seconds`."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._limits = settings.limits
        self._body_seconds = settings.body_seconds
        self._seconds = settings.request_seconds
        self._bodies = _BodyBytes(settings.max_bodies_bytes)
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
        outgoing = _Outgoing(send, scope)
        with self._bodies.share() as share:
            try:
                body = await self._body(scope, receive, share)
            except _Gone:
                return
            except HttpError as error:
                await reply_of(error, scope["path"])(scope, receive, outgoing)
                return
            await self._run(scope, receive, outgoing, body)

    async def _run(self, scope: Scope, receive: Receive, outgoing: _Outgoing, body: bytes) -> None:
        """The route, and the client's leaving."""
        work = asyncio.create_task(self._work(scope, body, outgoing))
        watch = asyncio.create_task(_until_gone(receive))
        self._in_work.add(work)
        work.add_done_callback(self._in_work.discard)
        try:
            seconds = self._seconds + GRACE_SECONDS if self._seconds else None
            await asyncio.wait({work, watch}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, watch):
                task.cancel()
            stopped, late = work.cancelled(), not work.done() and not watch.done()
            with suppress(asyncio.CancelledError):
                await work
            with suppress(asyncio.CancelledError):
                await watch
        if (stopped or late) and not outgoing.started:
            error = draining() if stopped else too_late(self._seconds)
            await reply_of(error, scope["path"])(scope, receive, outgoing)

    async def _work(self, scope: Scope, body: bytes, send: Send) -> None:
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()  # the one who watches for the end is outside
            raise AssertionError

        await self._app(scope, receive, send)

    async def _body(self, scope: Scope, receive: Receive, share: _BodyShare) -> bytes:
        declared = next((value for key, value in scope["headers"] if key == b"content-length"), b"0")
        if declared.isdigit() and len(declared) < 20 and int(declared) > self._limits.max_body_bytes:
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
                    if size > self._limits.max_body_bytes:
                        raise self._too_large(size)
                    share.grow(len(parts[-1]))
                    if not message.get("more_body", False):
                        break
        except TimeoutError as error:
            text = f"the request's body did not arrive within {self._body_seconds:g} s"
            raise HttpError(408, text, code="body_timeout", headers=_CLOSE) from error
        body = b"".join(parts)
        check_json_size(body, self._limits.max_json_depth, self._limits.max_json_containers)
        return body

    def _too_large(self, size: int) -> HttpError:
        # the connection stays open: closing it on a client that still sends would lose the reply
        message = f"the body has {size} bytes or more, at most {self._limits.max_body_bytes} are taken"
        return HttpError(413, f"{message} (split the request)", code="body_too_large")


class _BodyBytes:
    """The bytes of all bodies in hand, which may not be more than `most` together."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    @contextmanager
    def share(self) -> Iterator[_BodyShare]:
        """What one request holds, given back at the end."""
        made = _BodyShare(self)
        try:
            yield made
        finally:
            self.held -= made.size


class _BodyShare:
    """The bytes of one body."""

    def __init__(self, bodies: _BodyBytes) -> None:
        self._bodies = bodies
        self.size = 0

    def grow(self, size: int) -> None:
        """Hold more; HttpError where all bodies together have too much."""
        bodies = self._bodies
        if bodies.held + size > bodies.most:
            message = (
                f"the bodies of all requests in work have {bodies.held + size} bytes, at most {bodies.most} are held"
            )
            raise HttpError(503, message, "server_error", "bodies_full", headers={**retry_after(1), **_CLOSE})
        bodies.held += size
        self.size += size


class _Outgoing:
    """Sends, remembers whether it has begun, and puts the request's id on the reply, and what its key has left."""

    def __init__(self, send: Send, scope: Scope) -> None:
        self.started = False
        self._send = send
        self._id = _request_id(scope).encode()
        self._account = account_of(scope)

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            left = self._account.headers() if self._account is not None else {}
            more = [(b"x-request-id", self._id), *((name.encode(), value.encode()) for name, value in left.items())]
            message = {**message, "headers": [*message.get("headers", []), *more]}
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
