"""Ranks of one machine with a CUDA device each, connected by NCCL: the results of the same ranks without it.

Ranks are processes, as each has one device that its kernels run on.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.support.comm.ranks import join_group
from tests.support.models.families import save_model
from tests.unit.comm.collectives.test_intra_host import every_collective
from tllm.cli.commands.status import network_lines
from tllm.cluster.settings import IntraHost, Wiring
from tllm.comm.collectives.group import Group
from tllm.comm.collectives.intra_host import connect_devices
from tllm.comm.links.connect import Listener
from tllm.core.errors import LinkError
from tllm.devices.choose import compute_on
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.coordinator.status_report import report
from tllm.node.serve.open_cluster import open_cluster
from tllm.recipes.bench.processes import free_row
from tllm.spec.request import Request, SamplingParams

DEVICE = "cuda"
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has fewer than two CUDA devices")


def connected(rank: int, first: int) -> Group:
    device = torch.device("cuda", rank)
    compute_on(device)
    addresses = {other: ("127.0.0.1", first + other) for other in (0, 1)}
    group = join_group(rank, Listener(*addresses[rank]), addresses, None, deadline=60)
    words = connect_devices(group, "here", device, 60.0)
    assert words.endswith("NCCL between the devices of 2 ranks of a machine"), words
    return group


def collectives(rank: int, first: int, told: Connection) -> None:
    """Every collective of tensors on the device, and on the host by links; then a rank that is lost is named."""
    group = connected(rank, first)
    told.send([x.cpu() for x in every_collective(group, torch.device("cuda", rank))])
    told.send(every_collective(group, torch.device("cpu")))
    x = torch.ones(1 << 20, device=f"cuda:{rank}")
    for _ in range(20):
        group.all_reduce(x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        group.all_reduce(x)
    except LinkError as error:
        told.send((error.message, time.monotonic() - began))
    group.close()


def test_every_collective_is_that_of_links_and_a_lost_rank_is_named() -> None:
    context, first = multiprocessing.get_context("spawn"), free_row(2)
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [context.Process(target=collectives, args=(rank, first, pipes[rank][1])) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        for come, _ in pipes:
            assert come.poll(120)
            by_nccl, by_links = come.recv(), come.recv()
            assert len(by_nccl) == len(by_links) and all(map(torch.equal, by_nccl, by_links))
        assert pipes[0][0].poll(30)
        message, seconds = pipes[0][0].recv()
        assert "rank 1 went away" in message and seconds < 5
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def replies(model: Path, intra_host: IntraHost) -> tuple[list[int], str]:
    """What two ranks write, and what they say of their network."""
    sizes = EngineConfig(dtype="float32", cache_tokens=512, wiring=Wiring(intra_host=intra_host))

    async def scene() -> tuple[list[int], str]:
        async with asyncio.timeout(300), open_cluster(model, "tp=2", sizes, ClusterOptions(device=DEVICE)) as cluster:
            request = Request(id="r", prompt_ids=(5, 6, 7, 8), params=GREEDY)
            ids = [token async for output in cluster.submit(request) for token in output.token_ids]
            return ids, "".join(network_lines(report(cluster.state)))

    return asyncio.run(scene())


def test_replies_are_those_of_links(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    (by_links, _), (by_nccl, words) = replies(tmp_path, "links"), replies(tmp_path, "nccl")
    assert "tp: NCCL between the devices of 2 ranks of a machine" in words
    assert by_links == by_nccl and len(by_nccl) == GREEDY.max_tokens
