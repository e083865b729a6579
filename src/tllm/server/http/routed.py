"""Routes as an application whose every reply is JSON, errors too."""

from __future__ import annotations

import difflib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tllm.core.errors import UNREADABLE, RequestError, TllmError
from tllm.server.http.errors import MESSAGES, HttpError, as_http, reply_of

_T = TypeVar("_T")

ALIKE = 0.8
"""How alike two paths must be, from 0 to 1, for one to be taken for a mistyped other."""

OF_A_STORE = tuple(f"/api/{name}" for name in ("create", "copy", "push", "delete", "blobs/"))
"""Paths of ollama that change which models a server has."""

BATCHES = "this server has no batches: send requests side by side, and it computes them together"
NOT_OFFERED = {
    "/v1/batches": BATCHES,
    f"{MESSAGES}/batches": BATCHES,
    **dict.fromkeys(("/v1/files", "/v1/uploads", "/v1/containers"), "this server keeps no files"),
    **dict.fromkeys(("/v1/assistants", "/v1/threads"), "this server has no assistants: see /v1/responses"),
    "/v1/conversations": "this server keeps no conversations: send all turns with each request",
    **dict.fromkeys(("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"), "this server has text alone"),
    **dict.fromkeys(("/v1/fine_tuning", "/v1/evals"), "this server trains and evaluates nothing: `tllm train` does"),
    **dict.fromkeys(("/v1/moderations", "/v1/vector_stores"), "this server has neither moderation nor vector stores"),
}
"""What is said of paths of OpenAI's and of Anthropic's interface that begin so."""

_log = logging.getLogger("tllm.server")


Endpoint = Callable[[HttpRequest], Awaitable[Response]]


def routes(method: str, endpoints: Mapping[str, Endpoint]) -> list[Route]:
    """A route for each path, all for one method."""
    return [Route(path, endpoint, methods=[method]) for path, endpoint in endpoints.items()]


def routed(table: Sequence[Route]) -> Starlette:
    """An application of these routes."""
    made = Starlette(
        routes=table, exception_handlers={TllmError: _refusal, HTTPException: _no_route, Exception: _fault}
    )
    made.router.redirect_slashes = False
    return made


def decode(body: bytes, kind: type[_T]) -> _T:
    """A JSON body as a request; what is wrong with it is a `RequestError` that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error)[:500].partition(" - at `$.")
        path = path.rstrip("`")
        raise RequestError(f"{path}: {text}" if path else text, param=path or None) from error
    except UNREADABLE as error:
        why = str(error)[:200] if body.strip() else "it is empty"
        raise RequestError(f"the body is not JSON: {why}") from error


def json_reply(value: object) -> Response:
    """A reply with anything that msgspec encodes."""
    return Response(msgspec.json.encode(value), media_type="application/json")


async def lines_reply(source: AsyncGenerator[bytes, None], error_line: Callable[[TllmError], bytes]) -> Response:
    """A stream with a JSON object on each line. An error before the first line is raised, a later one is the last."""
    first = await anext(source, b"")

    async def lines() -> AsyncGenerator[bytes, None]:
        async with aclosing(source):
            yield first
            try:
                async for line in source:
                    yield line
            except TllmError as error:
                yield error_line(error)

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def _refusal(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, TllmError)
    return reply_of(as_http(error), http.url.path)


async def _no_route(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = http.url.path[:200]
    is_unknown = error.status_code == 404
    hint = (
        _meant(path, [route.path for route in http.app.routes]) if is_unknown else f"this path takes {_methods(error)}"
    )
    message = f"{http.method[:20]} {path!r}: {error.detail} ({hint})"
    kind = "not_found_error" if is_unknown else "invalid_request_error"
    return reply_of(HttpError(error.status_code, message, kind, headers=dict(error.headers or {})), http.url.path)


def _meant(path: str, known: Sequence[str]) -> str:
    """The path that one was meant to be which there is not: clients add `/v1` to an address, or do not."""
    if path.startswith(OF_A_STORE):
        return "this server has the model that it was started with, and makes, copies, sends and deletes none"
    for begin, why in NOT_OFFERED.items():
        if path == begin or path.startswith(begin + "/"):
            return why
    close = difflib.get_close_matches(path, known, n=1, cutoff=ALIKE)
    return f"did you mean {close[0]}?" if close else "this server has no such thing; its reference lists the paths"


def _methods(error: HTTPException) -> str:
    return (error.headers or {}).get("Allow", "another method")


async def _fault(http: HttpRequest, error: Exception) -> Response:
    _log.error("a fault in %s %s", http.method, http.url.path, exc_info=error)
    return reply_of(
        HttpError(500, "the server failed; its log says more", "server_error", "internal_error"), http.url.path
    )
