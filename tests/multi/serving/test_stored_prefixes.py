"""A chat goes on from disk: after nodes were killed, and after the server ended and began under another plan."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest

from tests.multi.faults.test_serving_recovery import SIZES, joining, kill, model, play, restored
from tests.support.cluster.processes import descendants, wait_until_gone
from tllm.engine.engine import Engine
from tllm.engine.page_store.page_folder import Box, PageFolder, covers
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.serve.open_cluster import open_cluster
from tllm.node.serve.serving import Serving
from tllm.node.sources.node_source import JoinLine
from tllm.spec.request import Request, SamplingParams

__all__ = ["model"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # it starts several processes that load torch

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
SAID = tuple(range(60, 70))
TURNS, LAYERS, KV_HEADS = 3, 4, 2


async def asked(cluster: Serving, turn: int, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The reply, and how many tokens of the prompt were found."""
    request = Request(id=f"turn {turn}", prompt_ids=prompt, params=GREEDY)
    outputs = [output async for output in cluster.submit(request)]
    return tuple(token for output in outputs for token in output.token_ids), sum(
        output.cached_tokens for output in outputs
    )


async def written(folder: Path, tokens: int) -> None:
    """Wait until all full pages of so many tokens are on disk, every layer and kv head of them."""
    while not folder.exists() or not list(folder.iterdir()):
        await asyncio.sleep(0.02)
    [model] = folder.iterdir()
    while True:
        pages = PageFolder(folder, model.name, 0)
        names = {bytes.fromhex(path.name[:64]) for path in model.glob("*/*")}
        if sum(covers(pages.boxes(name), Box(0, LAYERS, 0, KV_HEADS)) for name in names) >= tokens // 16:
            return
        await asyncio.sleep(0.02)


def chat(model: Path) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[int]]:
    """The prompts of a chat's turns, their replies, and how many tokens of each are whole pages of the turn before."""
    prompts, replies = [tuple(range(3, 43))], list[tuple[int, ...]]()
    with Engine.load(model, "pp=1", SIZES) as engine:
        for _ in range(TURNS):
            replies.append(tuple(engine.generate([prompts[-1]], GREEDY)[0]))
            prompts.append((*prompts[-1], *replies[-1], *SAID))
    return prompts, replies, [0, *((len(prompt) - len(SAID) - 1) // 16 * 16 for prompt in prompts[1:])]


def test_nodes_keep_each_others_pages(model: Path, tmp_path: Path) -> None:
    """Three machines with a folder each: of two that serve, the driver is killed, and its pages are with the other; a
    third, whose folder is empty, takes its place and is given what it lacks."""
    prompts, replies, found = chat(model)
    sizes = msgspec.structs.replace(SIZES, cache_dir=str(tmp_path / "coordinator"))

    async def scene() -> None:
        with contextlib.ExitStack() as stack:
            invited: list[tuple[str, str]] = []

            def join(name: str) -> None:
                stack.enter_context(joining(*invited[-1], name, pages=tmp_path / name))

            def invite(count: int, address: str, token: str) -> None:
                invited.append((address, token))
                if len(invited) == 1:
                    join("east")
                    join("west")

            options = ClusterOptions(local=0, source=JoinLine(invite), join_seconds=60)
            async with open_cluster(model, "pp=2", sizes, options) as cluster:
                driver, other = (member.node for member in cluster.state.ranks)
                assert await asked(cluster, 0, prompts[0]) == (replies[0], found[0])
                for node in (driver, other):
                    await written(tmp_path / node, len(prompts[0]) + 15)
                kill(cluster, 0)
                while cluster.is_open:
                    await asyncio.sleep(0.01)
                assert await asked(cluster, 1, prompts[1]) == (replies[1], found[1])
                assert [member.node for member in cluster.state.ranks] == [other]
                while len(invited) == 1:
                    await asyncio.sleep(0.01)
                join("north")
                await restored(cluster)
                assert "north" in {member.node for member in cluster.state.ranks}
                await asyncio.sleep(5)  # a rank asks for the names of pages when it is loaded, and again after 2 s
                assert await asked(cluster, 2, prompts[2]) == (replies[2], found[2])
                assert len(list((tmp_path / "north").glob("*/*/*"))) >= found[2] // 16, "it was given its part"

    play(scene)
    assert not list((tmp_path / "coordinator").iterdir()), "who only coordinates keeps no pages"


def test_a_chat_outlives_its_workers_and_its_server(model: Path, tmp_path: Path) -> None:
    """A worker is killed after the first turn; after the second all of them end, and others begin under tp=2."""
    prompts, replies, found = chat(model)
    sizes = msgspec.structs.replace(SIZES, cache_dir=str(tmp_path / "pages"))

    async def scene() -> None:
        async with open_cluster(model, "pp=2", sizes, ClusterOptions(threads=1)) as cluster:
            assert await asked(cluster, 0, prompts[0]) == (replies[0], found[0])
            await written(tmp_path / "pages", len(prompts[0]) + 15)
            kill(cluster, 1)
            while cluster.is_open:
                await asyncio.sleep(0.01)
            assert await asked(cluster, 1, prompts[1]) == (replies[1], found[1])
            await written(tmp_path / "pages", len(prompts[1]) + 15)
        async with open_cluster(model, "tp=2", sizes, ClusterOptions(threads=1)) as cluster:
            assert await asked(cluster, 2, prompts[2]) == (replies[2], found[2])

    play(scene)
    assert wait_until_gone(descendants()) == []
