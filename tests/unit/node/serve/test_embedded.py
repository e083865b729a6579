from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from tests.support.models.families import save_model
from tests.support.serving.scripted_engine import out
from tllm.core.errors import ClusterError, RequestError
from tllm.engine.engine import Engine, Put
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.serve.embedded import Embedded
from tllm.spec.request import Output, Request, SamplingParams

REQUEST = Request(id="r", prompt_ids=(1,), params=SamplingParams())


class Scripted:
    """An engine that, from a thread of its own, puts what it was made with."""

    limits = SimpleNamespace(max_model_len=64)
    plan = "pp=1"

    def __init__(self, *script: Output | ClusterError) -> None:
        self.script = script
        self.cancelled: list[str] = []

    def start(self, request: Request, put: Put) -> None:
        threading.Thread(target=lambda: [put(one) for one in self.script]).start()

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def stats(self) -> dict[str, float]:
        return {"running": 1.0}


class Held(Scripted):
    """One that keeps what it was to put outputs with."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[Put] = []

    def start(self, request: Request, put: Put) -> None:
        self.puts.append(put)


def embedded(engine: Any) -> Embedded:
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
    engine = Scripted(*script)
    client = embedded(engine)
    assert play(client) == list(script)
    assert engine.cancelled == []
    assert client.health().alive
    assert client.health().running == 1


def test_closing_early_cancels() -> None:
    engine = Scripted(out(5))
    assert play(embedded(engine), most=1) == [out(5)]
    assert engine.cancelled == [REQUEST.id]


def test_a_request_that_cannot_be_served_raises_and_harms_nothing() -> None:
    engine = Scripted(out(5), msgspec.structs.replace(out(reason="error"), error="too long"))
    client = embedded(engine)
    with pytest.raises(RequestError, match="too long"):
        play(client)
    assert client.health().alive
    assert engine.cancelled == []


def test_an_engine_that_fails_raises_where_the_outputs_are_awaited() -> None:
    client = embedded(Scripted(out(5), ClusterError("a rank failed")))
    with pytest.raises(ClusterError, match="a rank failed"):
        play(client)
    assert not client.health().alive


def test_outputs_for_a_loop_that_was_closed_are_dropped() -> None:
    engine = Held()

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(embedded(engine).submit(REQUEST)), 0.01)

    asyncio.run(leave())
    engine.puts[0](out(5))


def test_a_program_may_end_as_soon_as_it_has_its_reply(tmp_path: Path) -> None:
    """Only the engine's own threads, which it joins, may hold its model: tensors that another thread drops while Python
    ends abort the process ("terminate called without an active exception")."""
    save_model("llama", tmp_path)

    async def reply() -> weakref.ref[torch.nn.Module]:
        with Engine.load(tmp_path, "pp=1") as engine:
            before = set(threading.enumerate())
            async for _ in embedded(engine).submit(REQUEST):
                assert set(threading.enumerate()) <= before  # one of a test before may end meanwhile
            return weakref.ref(engine.stages[0].model)

    model = asyncio.run(reply())
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("plan", ["pp=1", "pp=2"])
def test_an_engine_tells_what_it_computes_of_a_prompt_before_the_first_token(plan: str, tmp_path: Path) -> None:
    """To whoever charges for it, and not to readers of tokens; nor of a reply that goes on, which has been paid for."""
    save_model("llama", tmp_path)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    asked = Request(id="r", prompt_ids=(1, 2, 3, 4, 5), params=params)

    async def outputs(client: Embedded, request: Request) -> list[Output]:
        return [output async for output in client.submit(request)]

    with Engine.load(tmp_path, plan, EngineConfig(cache_tokens=256)) as engine:
        first, *tokens = asyncio.run(outputs(embedded(engine), asked))
        assert first == Output(request_id="r", computed_tokens=5)
        assert list(engine.submit(asked)) == tokens and [len(one.token_ids) for one in tokens] == [1, 1, 1]
        rest = msgspec.structs.replace(asked, output_ids=tokens[0].token_ids)
        assert [one.token_ids for one in asyncio.run(outputs(embedded(engine), rest))] == [
            one.token_ids for one in tokens[1:]
        ]
