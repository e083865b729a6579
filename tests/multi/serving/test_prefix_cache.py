"""A cluster's prefix cache lives as long as its epoch: what ranks held that are gone is never found again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.multi.faults.test_serving_recovery import SIZES, kill, model, play
from tllm.cluster.heartbeat import BEAT_SECONDS
from tllm.engine.engine import Engine
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.serve.open_cluster import open_cluster
from tllm.node.serve.serving import Serving
from tllm.server.app import build_app
from tllm.spec.request import Request, SamplingParams

__all__ = ["model"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # it starts several processes that load torch

PROMPT = tuple(range(3, 43))
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


async def asked(cluster: Serving, name: str, salt: str = "") -> tuple[list[int], int]:
    """The reply, and how many tokens of the prompt were found."""
    outputs = [
        output async for output in cluster.submit(Request(id=name, prompt_ids=PROMPT, params=GREEDY, cache_salt=salt))
    ]
    return [token for output in outputs for token in output.token_ids], sum(output.cached_tokens for output in outputs)


async def until_told(client: httpx.AsyncClient, line: str) -> None:
    """Counts of ranks come with their heartbeats. A line that never comes is the test's own time limit."""
    while line not in (await client.get("/metrics")).text:
        await asyncio.sleep(BEAT_SECONDS)


def test_a_new_epoch_begins_with_an_empty_cache(model: Path) -> None:
    with Engine.load(model, "pp=1", SIZES) as engine:
        [truth] = engine.generate([PROMPT], GREEDY)

    async def scene() -> None:
        async with open_cluster(model, "pp=2", SIZES, ClusterOptions(threads=1)) as cluster:
            assert await asked(cluster, "first") == (truth, 0)
            assert await asked(cluster, "second") == (truth, 32)
            assert await asked(cluster, "salted", "salt") == (truth, 0)
            kill(cluster, 1)
            while cluster.is_open:
                await asyncio.sleep(0.01)
            assert await asked(cluster, "third") == (truth, 0)
            assert await asked(cluster, "fourth") == (truth, 32)
            transport = httpx.ASGITransport(app=build_app(cluster))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                body = {"prompt": list(PROMPT), "max_tokens": 24, "temperature": 0, "ignore_eos": True}
                reply = (await client.post("/v1/completions", json=body)).json()
                assert reply["choices"][0]["token_ids"] == truth
                assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
                labels = f'{{engine="0",model_name="{cluster.model_name}"}}'
                await until_told(client, f"vllm:prefix_cache_queries_total{labels} 120.0")
                await until_told(client, f"vllm:prefix_cache_hits_total{labels} 64.0")

    play(scene)
