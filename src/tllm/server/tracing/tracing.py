"""`Tracing`: follows each request that an application answers, and gives its trace away when all of it is known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tllm.core.tasks import end_tasks
from tllm.server.tracing.request_trace import CURRENT, RequestTrace
from tllm.spec.request import StageSpan

SPANS_SECONDS = 1.2
"""How long after its end a request's ranks are waited for: they tell what they did with each heartbeat."""

MOST_OPEN = 4096
"""Requests that are answered and whose traces are not given away yet; of more, the new ones have none."""

PARENT = ("traceparent", "tracestate")


class NodeSpan(NamedTuple):
    """What one rank did, and whose it is."""

    node: str
    rank: int
    span: StageSpan


SpansOf = Callable[[Collection[int]], Awaitable[Iterable[NodeSpan]]]
"""await spans_of(numbers): what the ranks have told of the sequences with these numbers"""


class TraceExporter(Protocol):
    """Where traces go. Nothing here waits for a network."""

    def export(self, trace: RequestTrace, spans: Iterable[NodeSpan]) -> None:
        """Take over a trace that is whole."""

    def close(self) -> None:
        """Send what is left, for a moment at most."""


class Tracing:
    """Every POST is traced but those to `/tokenize` and `/detokenize`, which the engine knows nothing of."""

    def __init__(self, exporter: TraceExporter, spans_of: SpansOf) -> None:
        self._exporter, self._spans_of = exporter, spans_of
        self._open: dict[asyncio.Task[None], RequestTrace] = {}  # answered, and not given away

    async def answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer one request."""
        if scope["type"] != "http" or scope["method"] != "POST" or "tokenize" in scope["path"]:
            await app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        parent = {name: headers[name] for name in PARENT if name in headers}
        trace = RequestTrace(scope["method"], scope["path"], parent)

        async def noticing(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
            await send(message)

        token = CURRENT.set(trace)
        try:
            await app(scope, receive, noticing)
        finally:
            CURRENT.reset(token)
            trace.end()
            self._keep(trace)

    async def close(self) -> None:
        """Give away what there is."""
        left = {task: trace for task, trace in self._open.items() if not task.done()}
        await end_tasks(*left)
        for trace in left.values():
            await self._give(trace)
        await asyncio.to_thread(self._exporter.close)

    def _keep(self, trace: RequestTrace) -> None:
        if len(self._open) >= MOST_OPEN:
            return
        task = asyncio.create_task(self._give_when_whole(trace), name="trace")
        self._open[task] = trace
        task.add_done_callback(self._open.pop)

    async def _give_when_whole(self, trace: RequestTrace) -> None:
        await asyncio.sleep(SPANS_SECONDS)
        while not trace.is_over:
            await asyncio.sleep(SPANS_SECONDS)
        await self._give(trace)

    async def _give(self, trace: RequestTrace) -> None:
        numbers = {sequence.request.trace for sequence in trace.sequences}
        self._exporter.export(trace, list(await self._spans_of(numbers)) if numbers else ())


OpenTracing = Callable[[str, SpansOf], Tracing | None]
"""open_tracing(model, spans_of): the traces of what an application answers with this model; None for none"""


def no_tracing(model: str, spans_of: SpansOf) -> None:
    """Where no traces are asked for."""
