from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tllm.cluster.messages import Cancel, Message, Submit
from tllm.ground.errors import ClusterError, RequestError
from tllm.node.requests import Requests
from tllm.spec.request import Output, Request, SamplingParams


def ask(name: str, seed: int | None = 3) -> Request:
    return Request(id=name, prompt_ids=(1,), params=SamplingParams(seed=seed))


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(5):
            await scene()

    asyncio.run(limited())


def test_outputs_go_to_their_own_request_and_end_it() -> None:
    async def scene() -> None:
        sent: list[Message] = []
        requests = Requests(sent.append)

        async def take(name: str) -> list[int]:
            return [token async for output in requests.submit(ask(name)) for token in output.token_ids]

        tasks = [asyncio.create_task(take(name)) for name in "ab"]
        await asyncio.sleep(0)
        assert sent == [Submit(ask("a")), Submit(ask("b"))]
        requests.deliver((Output(request_id="b", token_ids=(7,)), Output(request_id="gone", token_ids=(0,))))
        requests.deliver((Output(request_id="a", token_ids=(5, 6), finish_reason="stop"),))
        requests.deliver((Output(request_id="b", token_ids=(8,), finish_reason="length"),))
        assert [await task for task in tasks] == [[5, 6], [7, 8]]
        assert len(requests) == 0
        assert len(sent) == 2, "what ended by itself is not cancelled"

    play(scene)


def test_closing_cancels_once() -> None:
    async def scene() -> None:
        sent: list[Message] = []
        requests = Requests(sent.append)
        outputs = requests.submit(ask("a"))
        task = asyncio.create_task(anext(outputs))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        requests.deliver((Output(request_id="a", token_ids=(1,)),))
        await task
        await outputs.aclose()
        assert sent[1:] == [Cancel("a")]
        assert len(requests) == 0

    play(scene)


def test_a_request_without_a_seed_is_given_one() -> None:
    async def scene() -> None:
        sent: list[Message] = []
        task = asyncio.create_task(anext(Requests(sent.append).submit(ask("a", seed=None))))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert isinstance(sent[0], Submit)
        assert sent[0].request.params.seed is not None
        task.cancel()

    play(scene)


def test_a_loss_ends_every_open_request_with_an_error_of_its_own() -> None:
    async def scene() -> None:
        requests = Requests(lambda message: None)
        tasks = [asyncio.create_task(anext(requests.submit(ask(name)))) for name in "ab"]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        requests.fail(ClusterError("node x went away", "start it again"))
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(error) for error in done] == ["node x went away\nhint: start it again"] * 2
        assert done[0] is not done[1]
        assert len(requests) == 0

    play(scene)


def test_what_the_engine_refuses_is_the_requests_own_error() -> None:
    async def scene() -> None:
        requests = Requests(lambda message: None)
        task = asyncio.create_task(anext(requests.submit(ask("a"))))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        requests.deliver((Output(request_id="a", finish_reason="error", error="too long\nhint: shorten it"),))
        with pytest.raises(RequestError, match="too long") as caught:
            await task
        assert caught.value.hint == "shorten it"

    play(scene)
