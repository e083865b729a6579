"""The recorder over an engine whose numbers the test sets, and its report over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.serving.fake_engine import FakeEngine
from tests.unit.server.kit import TOKENIZER, client, get, refusal, run, say, serve
from tllm.server.app import App
from tllm.server.http.metrics import SequenceMetrics


class ReportedEngine(FakeEngine):
    """Reports what it is told to."""

    report: Mapping[str, Any] = {}

    def status(self) -> Mapping[str, Any]:
        return self.report


def report(epoch: int, computed: float, replies: float, batches: int, sent: int) -> Mapping[str, Any]:
    stats = {"compute_seconds": computed, "reply_seconds": replies, "reply_batches": batches}
    node = {"node": "a", "rank": 0, "stage": 0, "reason": "", "phase": "ready", "rss_bytes": 5}
    other = {"node": "spare", "rank": None, "reason": "", "phase": "joined"}
    return {
        "epoch": epoch,
        "plan": "pp=2",
        "ready": True,
        "nodes": [{**node, "stats": stats, "links": {"0>1": sent}}, other],
    }


def live(app: App, query: str = "") -> Any:
    return get(app, f"/v1/cluster/live{query}").json()


def test_counters_become_what_was_done_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ReportedEngine(lambda request: [5] * 8)
    app = serve(engine)
    clock = iter([10.0, 12.0, 14.0])
    monkeypatch.setattr(app.recorder, "_clock", lambda: next(clock))
    for said in (report(1, 1.0, 0.5, 5, 1000), report(1, 2.0, 1.1, 8, 1500), report(2, 0.5, 0.2, 1, 70)):
        engine.report = said
        app.recorder.sample()
    first, second, third = live(app)["samples"]
    assert second["seconds"] == 2.0 and second["links"] == {"0>1": 500}
    assert second["nodes"] == {"a": {"busy": 0.5, "step": pytest.approx(0.2), "rss_bytes": 5}}
    assert third["epoch"] == 2 and third["links"] == {"0>1": 70}, "counters begin anew with an epoch"
    assert third["nodes"]["a"] == {"busy": 0.25, "step": pytest.approx(0.2), "rss_bytes": 5}
    assert [sample["number"] for sample in live(app, "?after=0")["samples"]] == [1, 2]
    assert live(app, "?after=2&events_after=0")["samples"] == []
    assert first["nodes"].keys() == {"a"}, "a node without a rank computes nothing"


def test_tokens_and_latencies_of_requests_are_in_the_samples() -> None:
    app = serve(say())

    async def work() -> None:
        async with client(app) as http:
            app.recorder.sample()
            for _ in range(2):
                await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 5})
            app.recorder.sample()
            app.recorder.sample()

    run(work())
    before, sample, after = live(app)["samples"]
    assert before["generation_tokens"] == after["generation_tokens"] == 0
    assert sample["generation_tokens"] == 10
    assert sample["prompt_tokens"] == 2 * len(TOKENIZER.encode("hello"))
    assert sample["time_to_first_token"]["count"] == 2
    assert sample["inter_token_latency"]["count"] == 8
    assert after["time_to_first_token"] is None and after["inter_token_latency"] is None


def test_what_prompts_were_pooled_in_is_in_the_samples() -> None:
    app = serve(say())

    async def work() -> None:
        async with client(app) as http:
            await http.post("/v1/embeddings", json={"input": ["hello", "hello you", "you"]})
            app.recorder.sample()
            app.recorder.sample()

    run(work())
    sample, after = live(app)["samples"]
    assert sample["time_to_answer"]["count"] == 3 and 0 < sample["time_to_answer"]["max"] < 60
    assert sample["generation_tokens"] == 0 and sample["time_to_first_token"] is None
    assert after["time_to_answer"] is None


def test_a_sequence_in_hand_is_told_without_its_words() -> None:
    engine = say()
    engine.hold_after = 3
    app = serve(engine)

    async def work() -> Any:
        async with client(app) as http:
            asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 9}))
            while not app.router.open or next(iter(app.router.open.values())).output_tokens < 3:
                await asyncio.sleep(0.01)
            told = (await http.get("/v1/cluster/live")).json()
            engine.go_on.set()
            await asked
            return told

    told = run(work())
    [sequence] = told["sequences"]
    assert sequence.keys() == {"id", "age", "prompt_tokens", "output_tokens", "first_token"}
    assert sequence["output_tokens"] == 3 and 0 <= sequence["first_token"] <= sequence["age"]
    assert live(app)["sequences"] == []


def test_each_start_of_a_server_is_told_apart() -> None:
    one, other = serve(say()), serve(say())
    assert live(one)["run"] == live(one)["run"] != live(other)["run"]


@pytest.mark.parametrize("query", ["?after=x", "?after=1.5", "?events_after=-2", "?after=" + "9" * 30, "?after=٣"])
def test_numbers_that_are_none_are_refused(query: str) -> None:
    assert "whole number" in refusal(get(serve(say()), f"/v1/cluster/live{query}"), 400)["message"]


def test_latencies_that_nobody_takes_do_not_pile_up() -> None:
    metrics: SequenceMetrics = serve(say()).router.metrics.sequences
    for _ in range(12_000):
        metrics.went_on(0.001)
    assert len(metrics.take_recent().between_tokens) == 10_000
    assert not metrics.take_recent().between_tokens
