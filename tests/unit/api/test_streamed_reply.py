from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.support.serving.scripted_engine import ListedEngine, out
from tllm.api.streamed_reply import StreamedReply
from tllm.core.errors import ClusterError
from tllm.spec.request import Output, Request, SamplingParams, TokenLogprobs


def play(reply: StreamedReply, engine: ListedEngine) -> list[str]:
    async def collect() -> list[str]:
        return [text async for text in reply.stream(engine)]

    return asyncio.run(collect())


def request(**params: Any) -> Request:
    return Request(id="r", prompt_ids=(1, 2), params=SamplingParams(**params))


def test_ids_without_a_tokenizer() -> None:
    began, reply = time.perf_counter(), StreamedReply(request(), None)
    assert play(reply, ListedEngine(out(5), out(6, 7), out(reason="length"))) == ["", "", ""]
    assert reply.token_ids == [5, 6, 7]
    assert reply.finish_reason == "length"
    assert 0 <= reply.ttft_s <= time.perf_counter() - began
    assert reply.tokens_per_s > 0


def test_how_much_of_a_prompt_is_computed_is_no_piece_of_text() -> None:
    reply = StreamedReply(request(), None)
    assert play(reply, ListedEngine(Output(request_id="r", computed_tokens=2), out(5, reason="length"))) == [""]


def test_logprobs_are_kept_in_order() -> None:
    one, two = TokenLogprobs(5, -0.5), TokenLogprobs(6, -1.5)
    reply = StreamedReply(request(logprobs=0), None)
    play(reply, ListedEngine(out(5, logprobs=(one,)), out(6, logprobs=(two,), reason="length")))
    assert reply.logprobs == [one, two]


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ((out(5), out(reason="error", error="node lab-3 went away")), "lab-3"),
        ((out(5), out(reason="cancelled")), "cancelled"),
        ((out(5),), "without a reason"),
    ],
)
def test_an_engine_that_fails_is_a_cluster_error(outputs: tuple[Output, ...], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        play(StreamedReply(request(), None), ListedEngine(*outputs))
