"""A chat goes on from disk: after workers were killed, and after the server ended and began under another plan."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.multi.faults.test_serving_recovery import SIZES, kill, model, play
from tests.support.cluster.processes import descendants, wait_until_gone
from tllm.engine.engine import Engine
from tllm.engine.page_store.page_folder import Box, PageFolder, covers
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.serve.open_cluster import open_cluster
from tllm.node.serve.serving import Serving
from tllm.spec.request import Request, SamplingParams

__all__ = ["model"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]  # it starts several processes that load torch

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
SAID = tuple(range(60, 70))
TURNS, LAYERS, KV_HEADS = 4, 4, 2


async def asked(cluster: Serving, turn: int, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The reply, and how many tokens of the prompt were found."""
    request = Request(id=f"turn {turn}", prompt_ids=prompt, params=GREEDY)
    outputs = [output async for output in cluster.submit(request)]
    return tuple(token for output in outputs for token in output.token_ids), outputs[0].cached_tokens


async def written(folder: Path, tokens: int) -> None:
    """Wait until all full pages of so many tokens are on disk, every layer and kv head of them."""
    [model] = folder.iterdir()
    while True:
        pages = PageFolder(folder, model.name, 0)
        names = {bytes.fromhex(path.name[:64]) for path in model.glob("*/*")}
        if sum(covers(pages.boxes(name), Box(0, LAYERS, 0, KV_HEADS)) for name in names) >= tokens // 16:
            return
        await asyncio.sleep(0.02)


def test_a_chat_outlives_its_workers_and_its_server(model: Path, tmp_path: Path) -> None:
    """Turn by turn: served, another worker killed before the next, then all of them ended and begun under tp=2."""
    prompts, replies = [tuple(range(3, 43))], list[tuple[int, ...]]()
    with Engine.load(model, "pp=1", SIZES) as engine:
        for _ in range(TURNS):
            replies.append(tuple(engine.generate([prompts[-1]], GREEDY)[0]))
            prompts.append((*prompts[-1], *replies[-1], *SAID))
    sizes = msgspec.structs.replace(SIZES, cache_dir=str(tmp_path / "pages"))
    found = [0, *((len(prompt) - len(SAID) - 1) // 16 * 16 for prompt in prompts[1:])]

    async def scene() -> None:
        async with open_cluster(model, "pp=2", sizes, ClusterOptions(threads=1)) as cluster:
            for turn, victim in enumerate((1, 0)):
                assert await asked(cluster, turn, prompts[turn]) == (replies[turn], found[turn])
                await written(tmp_path / "pages", len(prompts[turn]) + 15)
                kill(cluster, victim)
                while cluster.is_open:
                    await asyncio.sleep(0.01)
            assert await asked(cluster, 2, prompts[2]) == (replies[2], found[2])
            await written(tmp_path / "pages", len(prompts[2]) + 15)
        async with open_cluster(model, "tp=2", sizes, ClusterOptions(threads=1)) as cluster:
            assert await asked(cluster, 3, prompts[3]) == (replies[3], found[3])

    play(scene)
    assert wait_until_gone(descendants(), 1.0) == []
