"""`PreparedReply`: a request that was read and checked, ready to be answered whole, as events, or as a state."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from tllm.server.http.sse import ErrorEvents, events, last_error
from tllm.server.openai.generation_job import GenerationJob
from tllm.server.openai.requests import SamplingFields
from tllm.server.reply.reply_ids import ReplyIds

Prepare = Callable[[bytes, Scope, ReplyIds], Awaitable["PreparedReply"]]
"""prepare(body, scope, ids): reads the body of a request. The ids of an earlier reply to it make that reply again."""


@dataclass(frozen=True, kw_only=True)
class PreparedReply:
    """One of its functions runs the job. `failed` is how an error ends the events after the first.

    `state` tells how far a reply has come, also of one that failed, where the interface has such a thing; else it is
    waited for (`whole`). `may_be_taken_up`: the request asks that. `is_background`: only the state is wanted.
    """

    job: GenerationJob
    is_stream: bool
    may_be_taken_up: bool
    whole: Callable[[], Awaitable[object]]
    events: Callable[[], AsyncGenerator[bytes, None]]
    failed: ErrorEvents
    state: Callable[[], Awaitable[Any]] | None = None
    is_background: bool = False


def prepared(request: SamplingFields, job: GenerationJob) -> PreparedReply:
    """Of a completion or a chat."""
    return PreparedReply(
        job=job,
        is_stream=bool(request.stream),
        may_be_taken_up=bool(request.store),
        whole=job.reply,
        events=lambda: events(job.chunks()),
        failed=last_error,
    )
