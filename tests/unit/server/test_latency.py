"""Times of requests, as predictions are compared with them."""

from __future__ import annotations

import asyncio

from tests.support.serving.scripted_engine import ListedEngine, out
from tllm.server.latency import TimedEngine
from tllm.spec.request import Output, Request, SamplingParams


def test_what_was_found_of_a_prompt_is_told() -> None:
    timed = TimedEngine(ListedEngine(out(5, cached_tokens=32), out(6, 7, reason="length")))

    async def play() -> None:
        request = Request(id="r", prompt_ids=tuple(range(40)), params=SamplingParams())
        assert [output.token_ids async for output in timed.submit(request)] == [(5,), (6, 7)]

    asyncio.run(play())
    [times] = timed.times
    assert (times.prompt, times.tokens, times.cached) == (40, 3, 32)
    assert times.came <= times.first <= times.last


def test_prompts_that_are_pooled_are_kept_apart() -> None:
    """Many of them push no reply out, which predictions are compared with."""
    timed = TimedEngine(ListedEngine(Output(request_id="r", pooled=(1.0, 2.0), cached_tokens=3, finish_reason="stop")))

    async def play() -> None:
        request = Request(id="r", prompt_ids=(1, 2, 3, 4), params=SamplingParams(max_tokens=1))
        assert len([output async for output in timed.submit(request)]) == 1

    asyncio.run(play())
    [times] = timed.pooled
    assert not timed.times
    assert (times.prompt, times.tokens, times.cached) == (4, 0, 3)
    assert 0 < times.came <= times.first == times.last
