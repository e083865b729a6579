"""Errors as HTTP replies of a few lines: `{"error": {message, type, param, code}}`, or as Anthropic or ollama do it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from starlette.responses import Response

from tllm.core.errors import CapacityError, ClusterError, RequestError, TllmError, counted
from tllm.server.admission.account import Refusal

MESSAGES = "/v1/messages"
"""At this path, and below it, errors have the shape of Anthropic's API."""

OLLAMA = "/api/"
"""Below this path errors have the shape of ollama's: `{"error": message}`."""

_ANTHROPIC_KINDS = {413: "request_too_large", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}
NAMES_TOLD = 5
_LONGEST = 2000  # characters of a message; bad input is not sent back at length


class ErrorInfo(msgspec.Struct):
    """The fields that OpenAI's clients read."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct):
    """The whole body of a reply that is an error, and of an error inside a stream."""

    error: ErrorInfo


class HttpError(TllmError):
    """A request that ends with a status of its own."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.info = ErrorInfo(message[:_LONGEST], kind, param, code)
        self.headers = headers or {}


def as_http(error: TllmError) -> HttpError:
    """The reply for any error of ours."""
    if isinstance(error, HttpError):
        return error
    text = f"{error.message} ({error.hint})" if error.hint else error.message
    if isinstance(error, RequestError):
        return HttpError(400, text, param=error.param)
    if isinstance(error, CapacityError):
        return HttpError(400, text, code="capacity")
    if isinstance(error, ClusterError):
        return HttpError(503, text, "server_error", "node_lost", headers={"retry-after": "5"})
    return HttpError(500, text, "server_error", "engine_error")


def body_of(error: HttpError, path: str = "") -> bytes:
    """The JSON of an error, as clients of that path read it."""
    if path.startswith(MESSAGES):
        kind = _ANTHROPIC_KINDS.get(error.status, error.info.type)
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.info.message}})
    if path.startswith(OLLAMA):
        return msgspec.json.encode({"error": error.info.message})
    return msgspec.json.encode(ErrorReply(error.info))


def reply_of(error: HttpError, path: str = "") -> Response:
    """The HTTP reply of an error, for a request of that path."""
    return Response(body_of(error, path), error.status, error.headers, "application/json")


def overloaded(message: str, seconds: float) -> HttpError:
    """Too much in hand: the client should come again after so long."""
    return HttpError(429, message, "rate_limit_error", "queue_full", headers=retry_after(seconds))


def queue_timeout(waited: float, waiting: int, seconds: float) -> HttpError:
    """A request has waited for as long as it may and has not begun."""
    wait = counted(waiting, "sequence waits", "sequences wait")
    message = f"the request has not begun within {waited:g} s; {wait} (try again later)"
    return HttpError(429, message, "rate_limit_error", "queue_timeout", headers=retry_after(seconds))


def rate_limited(refusal: Refusal) -> HttpError:
    """A key has used what it may use. What is larger than its limit is no matter of time, and a 400."""
    if refusal.seconds is None:
        headers = {"x-should-retry": "false"}
        return HttpError(400, refusal.message, code="request_too_large", param=refusal.limit, headers=headers)
    headers = retry_after(refusal.seconds)
    message = f"{refusal.message} (try again in {headers['retry-after']} s)"
    return HttpError(429, message, "rate_limit_error", "rate_limit_exceeded", refusal.limit, headers)


def too_late(seconds: float) -> HttpError:
    """A request took longer than any may."""
    message = f"the request is not finished after {seconds:g} s, the most that one may take (ask for fewer tokens)"
    return HttpError(504, message, "server_error", "deadline", headers={"connection": "close"})


def retry_after(seconds: float) -> dict[str, str]:
    """When to come again: whole seconds as HTTP has them, and milliseconds as OpenAI's clients read them."""
    return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, math.ceil(seconds * 1000)))}


def prompt_too_long(needs: str, max_model_len: int, param: str = "prompt") -> HttpError:
    """A prompt alone is more than the context holds; `needs` says how long it is.

    Programs know this by the words of Anthropic's servers ("prompt is too long"), of OpenAI's ("maximum context length
    is") or by OpenAI's code, and then shorten the conversation or ask another model.
    """
    message = (
        f"the prompt is too long: {needs}; this model's maximum context length is {max_model_len} tokens (shorten it)"
    )
    return HttpError(400, message, code="context_length_exceeded", param=param)


def context_exceeded(prompt_tokens: int, max_tokens: int, max_model_len: int) -> HttpError:
    """A prompt fits, but not with as many tokens more as are asked for. The words are OpenAI's, as above."""
    needs = f"{counted(prompt_tokens, 'prompt token')} and {max_tokens} to generate (shorten the prompt or max_tokens)"
    message = f"this model's maximum context length is {max_model_len} tokens, the request needs {needs}"
    return HttpError(400, message, code="context_length_exceeded", param="max_tokens")


def draining() -> HttpError:
    """The server is about to stop and takes nothing new."""
    headers = {"retry-after": "10", "connection": "close"}
    return HttpError(503, "the server is shutting down", "server_error", "draining", headers=headers)


def unknown_model(name: str, known: Sequence[str]) -> HttpError:
    """A model that is not served here. `known`: names that are."""
    more = f" and {len(known) - NAMES_TOLD} more" if len(known) > NAMES_TOLD else ""
    names = ", ".join(map(repr, known[:NAMES_TOLD]))
    text = f"the model {name[:100]!r} is not served here; this server has {names}{more}"
    return HttpError(404, text, "not_found_error", "model_not_found", "model")
