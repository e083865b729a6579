"""Workers of this machine that are asked to be bound: each has cores of its own, with every thread, and computes as
before."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.doctor.doctor import open_doctor
from tllm.node.topology.machine_topology import numa_nodes
from tllm.node.topology.numa_binding import NumaBinding
from tllm.node.topology.read_topology import read_processors

pytestmark = pytest.mark.skipif(
    len(read_processors().usable) < 2, reason="two workers are bound where there are two cores"
)

SECONDS = 100.0


def processors_of(asked: NumaBinding) -> list[tuple[set[int], set[int], int, int]]:
    """Of each of two workers: its processors, those of all its threads, its cores as it counts them, its own threads'
    count."""

    async def scene() -> list[tuple[set[int], set[int], int, int]]:
        options = ClusterOptions(local=2, numa_binding=asked)
        async with asyncio.timeout(SECONDS), open_doctor(2, options, measure_seconds=0.1, way_seconds=0.1) as doctor:
            found = []
            for rank, member in enumerate(doctor.state.ranks):
                pid = member.facts.pid
                probe = await doctor.probe_node(rank)
                threads = [os.sched_getaffinity(int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]
                used = probe.torch.threads
                found.append((os.sched_getaffinity(pid), set.union(*threads), probe.machine.cores, used))
            return found

    return asyncio.run(scene())


def test_each_worker_has_cores_of_its_own_and_counts_those_of_the_machine() -> None:
    given = os.sched_getaffinity(0)
    (one, one_all, cores, threads), (other, other_all, _, other_threads) = processors_of("exclusive")
    assert one and other and not one & other
    assert one | other <= given
    assert (one_all, other_all) == (one, other), "no thread is elsewhere"
    assert cores == len(given), "what others are told of the machine does not change"
    assert threads == other_threads == len(given) // 2, "nor what a sum depends on"


def test_nobody_is_bound_where_it_is_not_asked_for() -> None:
    (one, *_, threads), (other, *_) = processors_of("none")
    assert one == other == os.sched_getaffinity(0)
    assert threads == len(one) // 2


def test_by_itself_a_machine_of_one_numa_node_is_left_to_its_scheduler() -> None:
    if len(numa_nodes(read_processors().usable)) > 1:
        pytest.skip("this machine has several")
    (one, *_), (other, *_) = processors_of("auto")
    assert one == other == os.sched_getaffinity(0)


def test_a_worker_that_takes_anothers_place_takes_its_cores() -> None:
    async def scene() -> None:
        options = ClusterOptions(local=2, numa_binding="exclusive")
        async with asyncio.timeout(SECONDS), open_doctor(2, options, measure_seconds=0.1, way_seconds=0.1) as doctor:
            local = doctor.coordinator.local
            assert local is not None
            pid = doctor.state.ranks[1].facts.pid
            before = os.sched_getaffinity(pid)
            os.kill(pid, signal.SIGKILL)
            await local.start("local-1")
            process = local._workers["local-1"].process
            while process.pid is None or os.sched_getaffinity(process.pid) != before:
                await asyncio.sleep(0.05)
            local.renew_no_more()

    asyncio.run(scene())
