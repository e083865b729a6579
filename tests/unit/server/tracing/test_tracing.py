"""When a trace is whole, what is in it, and that no collector holds anything up."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Collection, Iterable
from typing import Any

import pytest

from tests.support.serving.otlp_collector import Collector, collecting
from tests.unit.server.kit import client, say, serve
from tllm.server.app import App
from tllm.server.tracing import otlp
from tllm.server.tracing import tracing as tracing_module
from tllm.server.tracing.otlp import OtlpTraces
from tllm.server.tracing.request_trace import RequestTrace
from tllm.server.tracing.tracing import NodeSpan, SpansOf, TraceExporter, Tracing
from tllm.spec.request import StageSpan

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a secret"}], "max_tokens": 3}


class Kept:
    """An exporter that keeps what it gets."""

    def __init__(self) -> None:
        self.traces: list[tuple[RequestTrace, list[NodeSpan]]] = []

    def export(self, trace: RequestTrace, spans: Iterable[NodeSpan]) -> None:
        self.traces.append((trace, list(spans)))

    def close(self) -> None:
        """There is nothing to send."""


pytestmark = pytest.mark.usefixtures("own_process")  # an exporter turns the library's logger down


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_module, "SPANS_SECONDS", 0.01)


async def no_spans(numbers: Collection[int]) -> list[NodeSpan]:
    return []


def ask(app: App, exporter: TraceExporter, spans_of: SpansOf = no_spans, *paths: str, **body: Any) -> list[int]:
    """The statuses of a request to each path, with tracing until all of it has been given away."""

    async def work() -> list[int]:
        app.tracing = Tracing(exporter, spans_of)
        async with client(app) as http:
            statuses = [(await http.post(path, json={**CHAT, **body})).status_code for path in paths]
        await app.tracing.close()
        return statuses

    return asyncio.run(work())


def test_each_request_is_a_trace_and_each_choice_a_sequence_with_a_number_of_its_own() -> None:
    kept, engine = Kept(), say()

    async def spans_of(numbers: Collection[int]) -> list[NodeSpan]:
        return [NodeSpan("north", 0, StageSpan(number, 1.0, 2.0, 3, 4, 0.5)) for number in sorted(numbers)]

    assert ask(serve(engine), kept, spans_of, "/v1/chat/completions", n=2) == [200]
    ((trace, spans),) = kept.traces
    assert (trace.method, trace.route, trace.status) == ("POST", "/v1/chat/completions", 200)
    numbers = {sequence.request.trace for sequence in trace.sequences}
    assert len(numbers) == 2 and 0 not in numbers
    assert {span.span.trace for span in spans} == numbers
    assert {request.trace for request in engine.submitted} == numbers, "the engine knows them by the same"


def test_without_tracing_no_rank_is_told_to_measure() -> None:
    engine = say()

    async def work() -> None:
        async with client(serve(engine)) as http:
            await http.post("/v1/chat/completions", json=CHAT)

    asyncio.run(work())
    assert [request.trace for request in engine.submitted] == [0]


def test_what_is_refused_or_asks_for_no_work_has_no_sequences() -> None:
    kept = Kept()
    app = serve(say())
    assert ask(app, kept, no_spans, "/v1/chat/completions", "/tokenize", messages="wrong")[0] == 400
    assert [(trace.route, trace.status, trace.sequences) for trace, _ in kept.traces] == [
        ("/v1/chat/completions", 400, [])
    ]


def whole(collector: Collector, count: int, **headers: str) -> Any:
    """The spans of one chat, by their names."""
    kept = Kept()

    async def spans_of(numbers: Collection[int]) -> list[NodeSpan]:
        return [NodeSpan("north", 1, StageSpan(n, 0.0, 9e9, 3, 7, 0.5)) for n in numbers]

    ask(serve(say()), kept, spans_of, "/v1/chat/completions")
    ((trace, spans),) = kept.traces
    trace.parent = headers
    exporter = OtlpTraces(collector.url, "fake")
    exporter.export(trace, spans)
    exporter.close()
    return {span.name: span for span in collector.wait(count)}


def test_a_rank_with_another_clock_stays_within_its_request() -> None:
    with collecting() as collector:
        spans = whole(collector, 6)
        sequence, stage = spans["chat fake"], spans["stage north"]
        assert (stage.start, stage.end) == (sequence.start, sequence.end)
        assert stage.attributes["tllm.compute_seconds"] == 0.5
        assert spans["POST /v1/chat/completions"].parent == "", "nobody called it in a trace of their own"
        assert {span.service for span in spans.values()} == {"tllm"}
        assert b"a secret" not in collector.raw


def test_a_traceparent_that_is_none_begins_a_trace() -> None:
    with collecting() as collector:
        root = whole(collector, 6, traceparent="00-" + "0" * 32 + "-nonsense")["POST /v1/chat/completions"]
        assert root.parent == "" and int(root.trace, 16) > 0


def test_who_samples_nothing_is_followed() -> None:
    with collecting() as collector:
        assert not whole(collector, 0, traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-00")


def ended() -> RequestTrace:
    """One that nobody called, of a request without a sequence: one span."""
    trace = RequestTrace("POST", "/v1/completions", {}, status=200)
    trace.end()
    return trace


def test_a_collector_that_is_away_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp, "EXPORT_SECONDS", 0.1)  # less than the library waits before it tries again
    with socket.socket() as nobody, caplog.at_level(logging.INFO):
        nobody.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        port = nobody.getsockname()[1]
        exporter = OtlpTraces(f"http://127.0.0.1:{port}", "fake")
        for _ in range(2):
            exporter.export(ended(), ())
            exporter._provider.force_flush(8000)
        exporter.close()
    said = [record.getMessage() for record in caplog.records if str(port) in record.getMessage()]
    assert len(said) == 1 and "takes no traces: they are dropped" in said[0], said


def test_a_collector_that_does_not_answer_holds_up_neither_requests_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers only after all calls have returned, so none of them can have waited for it."""
    monkeypatch.setattr(otlp, "EXPORT_SECONDS", 60.0)
    monkeypatch.setattr(otlp, "CLOSE_SECONDS", 0.05)
    with collecting() as collector:
        asked, answers, take = threading.Event(), threading.Event(), collector.take

        def hold(body: bytes) -> None:
            asked.set()
            assert answers.wait(20)
            take(body)

        monkeypatch.setattr(collector, "take", hold)
        exporter = OtlpTraces(collector.url, "fake")
        exporter.export(ended(), ())
        assert asked.wait(20), "the first one is being sent"
        for _ in range(5):
            exporter.export(ended(), ())
        exporter.close()
        [sending] = [thread for thread in threading.enumerate() if thread.name == "otlp"]
        answers.set()
        assert len(collector.wait(6)) == 6, "what waited is sent on"
        sending.join(20)
        assert not sending.is_alive()
