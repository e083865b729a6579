"""Serving outlives its nodes: processes that are killed and stopped, and streams that go on with the same tokens."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.families import save_model
from tests.support.processes import descendants, wait_until_gone
from tllm.engine.engine import Engine
from tllm.engine.size import EngineConfig
from tllm.node import members as members_module
from tllm.node.cluster import open_cluster
from tllm.node.serving import Serving
from tllm.spec.request import Output, Request, SamplingParams

pytestmark = pytest.mark.slow

SIZES = EngineConfig(cache_tokens=2048, max_model_len=256)
PROMPT = (1, 2, 3, 4)
GREEDY = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(
    max_tokens=200, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True, frequency_penalty=0.3, logprobs=2
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def truth(model: Path) -> dict[str, list[int]]:
    with Engine.load(model, "pp=1", SIZES) as engine:
        return {name: engine.generate([PROMPT], params)[0] for name, params in STREAMS.items()}


STREAMS = {"greedy": GREEDY, "seeded": SEEDED}


def play(scene: Callable[[], Awaitable[None]], seconds: float = 50.0) -> None:
    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await scene()

    asyncio.run(limited())


class Streams:
    """A greedy and a seeded stream, read as they come."""

    def __init__(self, cluster: Serving) -> None:
        self.cluster = cluster
        self.ids: dict[str, list[int]] = {name: [] for name in STREAMS}
        self.tasks = [asyncio.create_task(self._read(name, params)) for name, params in STREAMS.items()]

    async def _read(self, name: str, params: SamplingParams) -> None:
        request = Request(id=f"{name}-{id(self)}", prompt_ids=PROMPT, params=params)
        async for output in self.cluster.submit(request):
            self.ids[name] += output.token_ids
            assert bool(output.logprobs) == (params.logprobs is not None)

    async def reach(self, tokens: int) -> None:
        while min(map(len, self.ids.values())) < tokens:
            await asyncio.sleep(0.005)

    async def end(self) -> dict[str, list[int]]:
        await asyncio.gather(*self.tasks)
        return self.ids


def pid_of(cluster: Serving, rank: int) -> int:
    return cluster.state.ranks[rank].facts.pid


@pytest.mark.parametrize(("plan", "rank"), [("pp=3", 0), ("pp=3", 1), ("pp=2,tp=1+2", 2)])
def test_a_killed_worker_is_made_up_for_in_mid_stream(
    plan: str, rank: int, model: Path, truth: dict[str, list[int]]
) -> None:
    async def scene() -> None:
        async with open_cluster(model, plan, SIZES) as cluster:
            streams = Streams(cluster)
            await streams.reach(10)
            os.kill(pid_of(cluster, rank), signal.SIGKILL)
            start = time.monotonic()
            assert await streams.end() == truth
            print(f"recovered and ended within {time.monotonic() - start:.2f} s, {cluster.status()['doing']}")
            assert cluster.state.epoch == 2
            assert cluster.state.plan is not None and cluster.state.plan.world_size == 2

    play(scene)
    assert wait_until_gone(descendants(), 1.0) == []
