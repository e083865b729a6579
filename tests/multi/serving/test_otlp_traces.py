"""One request over three processes is one trace, as a collector gets it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.cluster.commands import running
from tests.support.serving.otlp_collector import CollectedSpan, collecting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # starts four processes that load torch

TINY = Path(__file__).parents[3] / "models" / "tiny"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET_TEXT = "a prompt that nobody else may read"
ASKED = {"prompt": SECRET_TEXT, "max_tokens": 12, "ignore_eos": True, "temperature": 0}


def inside(span: CollectedSpan, other: CollectedSpan) -> bool:
    return other.start <= span.start <= span.end <= other.end


def test_a_request_is_one_trace_through_every_node() -> None:
    with collecting() as collector:
        words = ["--local", "3", "--plan", "pp=3", "--threads", "1", "--port", "0", "--otlp-endpoint", collector.url]
        with running("serve", str(TINY), *words, env={"OTEL_SERVICE_NAME": "lab"}) as server:
            url = server.until(r"serving tiny at (\S+)/v1")[1]
            headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
            reply = httpx.post(f"{url}/v1/completions", json=ASKED, headers=headers, timeout=60).json()
            spans = collector.wait(8)
            assert len(spans) == 8, "however many turns of the ring there were"
            assert server.interrupt()[0] == 0
    by_name = {span.name: span for span in spans}
    root, whole = by_name["POST /v1/completions"], by_name["text_completion tiny"]
    assert {span.trace for span in spans} == {TRACE}
    assert {span.service for span in spans} == {"lab"}
    assert (root.parent, whole.parent) == (CALLER, root.id)
    parts = [span for span in spans if span not in (root, whole)]
    assert {span.parent for span in parts} == {whole.id}
    assert all(inside(span, whole) for span in parts) and inside(whole, root)
    queue, prefill, answer = by_name["queue"], by_name["prefill"], by_name["reply"]
    assert queue.end == prefill.start and prefill.end == answer.start
    assert (queue.start, answer.end) == (whole.start, whole.end)
    stages = [by_name[f"stage local-{number}"] for number in range(3)]
    assert [span.attributes["tllm.rank"] for span in stages] == [0, 1, 2]
    for span in stages:
        assert span.attributes["tllm.turns"] == 12
        assert span.attributes["tllm.tokens"] == reply["usage"]["prompt_tokens"] + 11
        assert 0 < span.attributes["tllm.compute_seconds"] <= (span.end - span.start) / 1e9
    assert stages[0].start <= stages[1].start <= stages[2].start, "as the ring goes"
    assert whole.attributes["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
    assert whole.attributes["gen_ai.usage.output_tokens"] == reply["usage"]["completion_tokens"] == 12
    assert whole.attributes["gen_ai.request.model"] == "tiny"
    assert root.attributes["http.response.status_code"] == 200
    assert SECRET_TEXT.encode() not in collector.raw and reply["choices"][0]["text"].encode() not in collector.raw
