from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from tllm.cluster.messages import Cancel, Message, Submit
from tllm.core.errors import ClusterError, NonFiniteError, RequestError, TllmError
from tllm.node.serve.open_requests import TRIES, OpenRequests
from tllm.spec.request import Output, Request, SamplingParams


def ask(name: str, seed: int | None = 3) -> Request:
    return Request(id=name, prompt_ids=(1,), params=SamplingParams(seed=seed))


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await scene()

    asyncio.run(limited())


def test_outputs_go_to_their_own_request_and_end_it() -> None:
    async def scene() -> None:
        sent: list[Message] = []
        requests = OpenRequests(sent.append)

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
        requests = OpenRequests(sent.append)
        outputs = requests.submit(ask("a"))
        task = asyncio.create_task(anext(outputs))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        requests.deliver((Output(request_id="a", token_ids=(1,)),))
        await task
        await outputs.aclose()
        assert sent[1:] == [Cancel("a")]
        assert len(requests) == 0

    play(scene)


def test_a_request_beside_others_does_not_move_the_time_since_which_work_is_there() -> None:
    """By it the engine is found not to get on: requests that go on coming would hide that."""

    async def scene() -> None:
        now = [10.0]
        requests = OpenRequests(lambda message: None, lambda: now[0])

        async def take(name: str) -> list[Output]:
            return [output async for output in requests.submit(ask(name))]

        async def begun(name: str) -> asyncio.Task[list[Output]]:
            taking = asyncio.create_task(take(name))
            await asyncio.sleep(0)
            return taking

        tasks = [await begun("a")]
        now[0] = 11.0
        tasks.append(await begun("b"))
        assert requests.busy_since == 10.0
        requests.deliver(tuple(Output(request_id=name, finish_reason="stop") for name in "ab"))
        await asyncio.gather(*tasks)
        last = await begun("c")
        assert requests.busy_since == 11.0
        last.cancel()

    play(scene)


def test_a_request_without_a_seed_is_given_one() -> None:
    async def scene() -> None:
        sent: list[Message] = []
        task = asyncio.create_task(anext(OpenRequests(sent.append).submit(ask("a", seed=None))))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert isinstance(sent[0], Submit)
        assert sent[0].request.params.seed is not None
        task.cancel()

    play(scene)


def test_a_loss_ends_every_open_request_with_an_error_of_its_own() -> None:
    async def scene() -> None:
        requests = OpenRequests(lambda message: None)
        tasks = [asyncio.create_task(anext(requests.submit(ask(name)))) for name in "ab"]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        requests.fail(ClusterError("node x went away", "start it again"))
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(error) for error in done] == ["node x went away\nhint: start it again"] * 2
        assert done[0] is not done[1]
        assert len(requests) == 0

    play(scene)


def test_what_is_open_goes_on_where_it_was_in_the_next_epoch() -> None:
    async def scene() -> None:
        sent: list[Message] = []
        requests = OpenRequests(sent.append)
        again = msgspec.structs.replace(ask("a"), output_ids=(4,))
        whole = requests.submit(again)
        ended, closed = requests.submit(ask("ended")), requests.submit(ask("closed"))
        tasks = [asyncio.create_task(anext(one)) for one in (whole, ended, closed)]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        requests.deliver((Output(request_id="a", token_ids=(5, 6)), Output(request_id="closed", token_ids=(1,))))
        requests.deliver((Output(request_id="ended", token_ids=(7,), finish_reason="stop"),))
        await asyncio.gather(*tasks)
        await closed.aclose()
        sent.clear()
        requests.resume()
        assert sent == [Submit(msgspec.structs.replace(again, output_ids=(4, 5, 6)))]
        requests.deliver((Output(request_id="a", token_ids=(8,)),))
        requests.resume()
        assert sent[1:] == [Submit(msgspec.structs.replace(again, output_ids=(4, 5, 6, 8)))]
        requests.fail(ClusterError("nobody is left"))
        requests.resume()
        requests.deliver((Output(request_id="a", token_ids=(9,)),))
        assert len(sent) == 2, "what has its error is over"
        assert (await anext(whole)).token_ids == (8,)
        with pytest.raises(ClusterError, match="nobody is left"):
            await anext(whole)
        assert [output.token_ids async for output in ended] == []

    play(scene)


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_request_that_no_epoch_survives_is_given_up(tokens: int) -> None:
    """It may be what nodes fail of. One that gets a token each time may go on for ever."""

    async def scene() -> None:
        sent: list[Message] = []
        requests = OpenRequests(sent.append)
        outputs = requests.submit(ask("a"))
        task = asyncio.create_task(anext(outputs))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        for n in range(TRIES + 1):
            requests.deliver((Output(request_id="a", token_ids=(n,)),) * tokens)
            requests.resume()
        if tokens:
            assert len(sent) == TRIES + 2
            await task
        else:
            assert len(sent) == TRIES
            with pytest.raises(ClusterError, match="request a was begun 4 times"):
                await task
        await outputs.aclose()

    play(scene)


@pytest.mark.parametrize(("is_non_finite", "kind"), [(False, RequestError), (True, NonFiniteError)])
def test_what_the_engine_refuses_is_the_requests_own_error(is_non_finite: bool, kind: type[TllmError]) -> None:
    told = Output(
        request_id="a", finish_reason="error", error="too long\nhint: shorten it", is_non_finite=is_non_finite
    )

    async def scene() -> None:
        requests = OpenRequests(lambda message: None)
        task = asyncio.create_task(anext(requests.submit(ask("a"))))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        requests.deliver((told,))
        with pytest.raises(kind, match="too long") as caught:
            await task
        assert caught.value.hint == "shorten it"

    play(scene)
