"""One request over three processes is one trace, as a collector gets it, whichever of their servers was asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster.commands import running
from tests.support.serving.otlp_collector import CollectedSpan, collecting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # starts five processes that load torch

TINY = Path(__file__).parents[3] / "models" / "tiny"
TRACES, CALLER = ("0af7651916cd43dd8448eb211c80319c", "4bf92f3577b34da6a3ce929d0e0e4736"), "b7ad6b7169203331"
SECRET_TEXT = "a prompt that nobody else may read"
ASKED = {"prompt": SECRET_TEXT, "max_tokens": 12, "ignore_eos": True, "temperature": 0}


def inside(span: CollectedSpan, other: CollectedSpan) -> bool:
    return other.start <= span.start <= span.end <= other.end


def asked(url: str, trace: str) -> dict[str, Any]:
    headers = {"traceparent": f"00-{trace}-{CALLER}-01"}
    reply: dict[str, Any] = httpx.post(f"{url}/v1/completions", json=ASKED, headers=headers, timeout=60).json()
    return reply


def test_a_request_is_one_trace_through_every_node() -> None:
    service = {"OTEL_SERVICE_NAME": "lab"}
    with collecting() as collector:
        own = ["--threads", "1", "--port", "0", "--otlp-endpoint", collector.url]
        words = ["--nodes", "2", "--plan", "pp=2", *own]
        with running("serve", str(TINY), *words, env=service) as server:
            line = server.until(r"tllm join (\S+) --token (\S+)")
            joining = [line[1], "--token", line[2], "--name", "north", "--serve", *own]
            with running("join", *joining, env=service) as node:
                urls = [one.until(r"serving tiny at (\S+)/v1")[1] for one in (server, node)]
                replies = [asked(url, trace) for url, trace in zip(urls, TRACES, strict=True)]
                spans = collector.wait(14)
                assert server.interrupt()[0] == 0
    assert len(spans) == 14, "however many turns of the ring there were"
    assert {span.service for span in spans} == {"lab"}
    for trace, reply in zip(TRACES, replies, strict=True):
        check_trace({span.name: span for span in spans if span.trace == trace}, reply)
    assert SECRET_TEXT.encode() not in collector.raw
    assert not any(reply["choices"][0]["text"].encode() in collector.raw for reply in replies)


def check_trace(by_name: dict[str, CollectedSpan], reply: dict[str, Any]) -> None:
    assert len(by_name) == 7
    root, whole = by_name["POST /v1/completions"], by_name["text_completion tiny"]
    assert (root.parent, whole.parent) == (CALLER, root.id)
    parts = [span for span in by_name.values() if span not in (root, whole)]
    assert {span.parent for span in parts} == {whole.id}
    assert all(inside(span, whole) for span in parts) and inside(whole, root)
    queue, prefill, answer = by_name["queue"], by_name["prefill"], by_name["reply"]
    assert queue.end == prefill.start and prefill.end == answer.start
    assert (queue.start, answer.end) == (whole.start, whole.end)
    stages = [by_name[f"stage {node}"] for node in ("local-0", "north")]
    assert [span.attributes["tllm.rank"] for span in stages] == [0, 1]
    for span in stages:
        assert span.attributes["tllm.turns"] == 12
        assert span.attributes["tllm.tokens"] == reply["usage"]["prompt_tokens"] + 11
        assert 0 < span.attributes["tllm.compute_seconds"] <= (span.end - span.start) / 1e9
    assert stages[0].start <= stages[1].start, "as the ring goes"
    assert whole.attributes["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
    assert whole.attributes["gen_ai.usage.output_tokens"] == reply["usage"]["completion_tokens"] == 12
    assert whole.attributes["gen_ai.request.model"] == "tiny"
    assert root.attributes["http.response.status_code"] == 200
