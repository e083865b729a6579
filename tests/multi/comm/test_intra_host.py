"""Two machines of two ranks each, as processes, with gloo in NCCL's place: sums, and a rank that dies or hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch

from tests.support.comm.fixed_choice import FixedChoice
from tests.support.comm.gloo_devices import CPU, GlooDevices
from tests.support.comm.ranks import join_group
from tllm.comm.collectives.all_reduce import HierarchicalAllReduce, two_step_all_reduce
from tllm.comm.collectives.group import Group
from tllm.comm.collectives.intra_host import connect_devices
from tllm.comm.links.connect import Listener
from tllm.core.errors import LinkClosed, LinkError, LinkTimeout
from tllm.recipes.bench.processes import free_row

HOSTS = "aabb"
ROUNDS = 3


def connected(rank: int, listener: Listener, addresses: dict[int, tuple[str, int]]) -> Group:
    group = join_group(rank, listener, addresses, None, deadline=60)
    words = connect_devices(group, HOSTS[rank], CPU, 60.0, GlooDevices(f"device {rank}"))
    assert words.endswith("gloo between the devices of 2 ranks of a machine")
    group.choice = FixedChoice(HierarchicalAllReduce([0, 0, 1, 1], two_step_all_reduce))
    return group


def sum_and_wait(rank: int, addresses: dict[int, tuple[str, int]]) -> None:
    group = connected(rank, Listener(*addresses[rank]), addresses)
    for _ in range(ROUNDS):
        group.all_reduce(torch.full((3001,), 2.0**rank))
    time.sleep(60)


@pytest.mark.parametrize(
    ("number", "deadline", "error", "words"),
    [
        (signal.SIGKILL, 60, LinkClosed, "rank 1 went away while rank 0 waited for messages between devices"),
        (signal.SIGSTOP, 1, LinkTimeout, "rank 1 did not come to exchange tensors with rank 0 between their devices"),
    ],
    ids=["killed", "stopped"],
)
def test_machines_sum_and_a_rank_that_dies_or_hangs_is_named_in_time(
    number: signal.Signals, deadline: float, error: type[LinkError], words: str
) -> None:
    listener, first = Listener("127.0.0.1", 0), free_row(3)
    addresses = {0: listener.address, **{rank: ("127.0.0.1", first + rank - 1) for rank in (1, 2, 3)}}
    context = multiprocessing.get_context("forkserver")  # which has imported torch
    context.set_forkserver_preload([__name__])
    peers = [context.Process(target=sum_and_wait, args=(rank, addresses)) for rank in (1, 2, 3)]
    for peer in peers:
        peer.start()
    group = connected(0, listener, addresses)
    try:
        for _ in range(ROUNDS):
            assert group.all_reduce(torch.ones(3001)).unique().tolist() == [15.0]
        group.set_deadline(deadline)
        assert peers[0].pid is not None
        os.kill(peers[0].pid, number)
        start = time.monotonic()
        with pytest.raises(error, match=words):
            group.all_reduce(torch.ones(3001))
        assert time.monotonic() - start < 40, "the deadline was 60 s"
        with pytest.raises(LinkClosed, match="group is over"):
            group.all_reduce(torch.ones(3001))
    finally:
        for peer in peers:
            peer.kill()
            peer.join()
        group.close()
