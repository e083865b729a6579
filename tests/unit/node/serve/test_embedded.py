from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.serving.scripted_engine import out
from tllm.core.errors import ClusterError, RequestError, TllmError
from tllm.engine.engine import Engine
from tllm.node.serve.embedded import Embedded
from tllm.spec.request import Output, Request, SamplingParams

REQUEST = Request(id="r", prompt_ids=(1,), params=SamplingParams())


class Scripted:
    """An engine and its stream in one: gives what it was made with, then waits for `close` if it has not ended."""

    limits = SimpleNamespace(max_model_len=64)
    plan = "pp=1"

    def __init__(self, *script: Output | TllmError) -> None:
        self.script = script
        self.closed = threading.Event()

    def submit(self, request: Request) -> Scripted:
        return self

    def stats(self) -> dict[str, float]:
        return {"running": 1.0}

    def close(self) -> None:
        self.closed.set()

    def __iter__(self) -> Iterator[Output]:
        for one in self.script:
            if isinstance(one, TllmError):
                raise one
            yield one
        self.closed.wait()


def embedded(engine: Scripted) -> Embedded:
    return Embedded(cast(Engine, engine), "m")


def play(client: Embedded, most: int = 99) -> list[Output]:
    async def collect() -> list[Output]:
        found: list[Output] = []
        outputs = client.submit(REQUEST)
        async for output in outputs:
            found.append(output)
            if len(found) == most:
                break
        await outputs.aclose()
        return found

    return asyncio.run(collect())


def test_outputs_come_in_order_and_end() -> None:
    script = (out(5), out(6), out(reason="length"))
    client = embedded(Scripted(*script))
    assert play(client) == list(script)
    assert client.health().alive
    assert client.health().running == 1


def test_closing_early_cancels() -> None:
    engine = Scripted(out(5))
    assert play(embedded(engine), most=1) == [out(5)]
    assert engine.closed.is_set()


@pytest.mark.parametrize(("error", "alive"), [(RequestError("too long"), True), (ClusterError("a rank failed"), False)])
def test_a_failure_is_raised_where_the_outputs_are_awaited(error: Any, alive: bool) -> None:
    client = embedded(Scripted(out(5), error))
    with pytest.raises(type(error), match=error.message):
        play(client)
    assert client.health().alive is alive
