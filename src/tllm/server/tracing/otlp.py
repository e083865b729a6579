"""`OtlpTraces`: traces as OpenTelemetry has them, sent over HTTP by its own library, which only this module imports.

Names follow its semantic conventions for HTTP and for generative AI; `gen_ai.latency.*` and `gen_ai.request.id` are
vLLM's. No text of a prompt or a reply is in a span.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from tllm import __version__
from tllm.server.tracing.request_trace import RequestTrace, TracedSequence
from tllm.server.tracing.tracing import NodeSpan

log = logging.getLogger("tllm.server")

PATH = "/v1/traces"
EXPORT_SECONDS = 5.0
"""How long the collector may take for one batch, all tries together."""

CLOSE_SECONDS = 2.0
QUEUED = 4096
"""Spans that wait to be sent; more are dropped."""

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
}
"""`gen_ai.operation.name` by route; of any other it is "chat"."""

Attributes = Mapping[str, AttributeValue]


class OtlpTraces:
    """Spans go to the collector at `endpoint` in a thread of the library's; what it does not take is dropped.

    An endpoint without a path gets that of OTLP. The service is called by OTEL_SERVICE_NAME, else tllm.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        url = endpoint if urlsplit(endpoint).path not in ("", "/") else endpoint.rstrip("/") + PATH
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        resource = Resource.create({} if named else {SERVICE_NAME: "tllm"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        sending = ToldOnce(OTLPSpanExporter(endpoint=url, timeout=EXPORT_SECONDS), url)
        self._provider.add_span_processor(BatchSpanProcessor(sending, QUEUED, schedule_delay_millis=1000))
        self._tracer: Tracer = self._provider.get_tracer("tllm", __version__)
        self._model = model

    def export(self, trace: RequestTrace, spans: Iterable[NodeSpan]) -> None:
        """Make the trace's spans. The first is a child of the caller's, by its `traceparent`."""
        parent = TraceContextTextMapPropagator().extract(trace.parent)
        attributes: Attributes = {
            "http.request.method": trace.method,
            "url.path": trace.route,
            "http.route": trace.route,
            "http.response.status_code": trace.status,
        }
        name = f"{trace.method} {trace.route}"
        root = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=trace.began)
        if trace.status >= 500 or trace.status == 0:
            root.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(root, parent)
        ends = [self._sequence(trace, one, list(spans), inside) for one in trace.sequences]
        root.end(max([trace.ended, *ends]))

    def close(self) -> None:
        """Send what is queued, for a moment at most."""
        ending = threading.Thread(target=self._provider.shutdown, name="otlp", daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)

    def _sequence(self, trace: RequestTrace, one: TracedSequence, spans: Sequence[NodeSpan], inside: Context) -> int:
        """One choice: how it waited, its prompt, its reply, and what each rank did for it; when it ended."""
        timer = one.timer
        began, first, ended = (trace.nanoseconds(moment) for moment in timer.moments)
        mine = [node for node in spans if node.span.trace == one.request.trace]
        computed = min((int(node.span.began * 1e9) for node in mine), default=began)
        computed = min(max(computed, began), first)
        operation = OPERATIONS.get(trace.route, "chat")
        span = self._tracer.start_span(
            f"{operation} {self._model}", inside, SpanKind.INTERNAL, self._request(one, operation), start_time=began
        )
        span.set_attribute("gen_ai.latency.time_in_queue", (computed - began) / 1e9)
        span.set_attribute("gen_ai.latency.e2e", (ended - began) / 1e9)
        if timer.output_tokens:
            span.set_attribute("gen_ai.latency.time_to_first_token", (first - began) / 1e9)
        if timer.reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        within = set_span_in_context(span, inside)
        self._part("queue", within, began, computed)
        self._part("prefill", within, computed, first)
        if timer.output_tokens:
            self._part("reply", within, first, ended)
        for node in mine:
            start, stop = (min(max(int(at * 1e9), began), ended) for at in (node.span.began, node.span.ended))
            attributes: Attributes = {
                "tllm.node": node.node,
                "tllm.rank": node.rank,
                "tllm.turns": node.span.turns,
                "tllm.tokens": node.span.tokens,
                "tllm.compute_seconds": node.span.seconds,
            }
            self._part(f"stage {node.node}", within, start, stop, attributes)
        span.end(ended)
        return ended

    def _part(self, name: str, inside: Context, began: int, ended: int, attributes: Attributes | None = None) -> None:
        self._tracer.start_span(name, inside, attributes=attributes, start_time=began).end(ended)

    def _request(self, one: TracedSequence, operation: str) -> dict[str, AttributeValue]:
        """What was asked and what came, in numbers."""
        request, timer = one.request, one.timer
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "tllm",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": request.id,
            "gen_ai.request.max_tokens": request.params.max_tokens,
            "gen_ai.request.temperature": request.params.temperature,
            "gen_ai.request.top_p": request.params.top_p,
            "gen_ai.usage.input_tokens": timer.prompt_tokens,
            "gen_ai.usage.output_tokens": timer.output_tokens,
            "gen_ai.response.finish_reasons": [timer.reason],
        }


class ToldOnce(SpanExporter):
    """Says once that a collector takes nothing, and once that it does again; the library's own words are not shown."""

    def __init__(self, exporter: SpanExporter, url: str) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter, self._url = exporter, url
        self._is_away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_away = result is not SpanExportResult.SUCCESS
        if is_away and not self._is_away:
            log.warning("the collector at %s takes no traces: they are dropped until it does", self._url)
        elif self._is_away and not is_away:
            log.info("the collector at %s takes traces again", self._url)
        self._is_away = is_away
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
