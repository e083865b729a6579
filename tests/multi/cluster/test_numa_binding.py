"""Workers of this machine that are asked to be bound: each has cores of its own, with every thread, and computes as
before."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.doctor.doctor import Doctor, open_doctor
from tllm.node.topology.machine_topology import numa_nodes
from tllm.node.topology.numa_binding import NumaBinding
from tllm.node.topology.read_topology import read_processors

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(len(read_processors().usable) < 2, reason="two workers are bound where there are two cores"),
]

SECONDS = 100.0


@dataclass(frozen=True)
class Bound:
    """Processors of a worker and of all its threads; the cores that it counts and the threads that it computes with, if
    it was asked for what it measures, which takes seconds."""

    processors: set[int]
    of_threads: set[int]
    cores: int = 0
    threads: int = 0


def workers_bound(asked: NumaBinding) -> list[Bound]:
    """Two workers."""

    async def scene() -> list[Bound]:
        async with opened(asked) as doctor:
            return [await bound(doctor, rank) for rank in range(2)]

    return asyncio.run(scene())


@contextlib.asynccontextmanager
async def opened(asked: NumaBinding) -> AsyncIterator[Doctor]:
    options = ClusterOptions(local=2, numa_binding=asked)
    async with asyncio.timeout(SECONDS), open_doctor(2, options, measure_seconds=0.1, way_seconds=0.1) as doctor:
        yield doctor


async def bound(doctor: Doctor, rank: int, is_asked: bool = False) -> Bound:
    """A worker, which may be asked for what it measures."""
    pid, counted = doctor.state.ranks[rank].facts.pid, {}
    if is_asked:
        probe = await doctor.probe_node(rank)
        counted = dict(cores=probe.machine.cores, threads=probe.torch.threads)
    threads = [os.sched_getaffinity(int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]
    return Bound(os.sched_getaffinity(pid), set.union(*threads), **counted)


def test_each_worker_has_cores_of_its_own_and_who_takes_its_place_has_them() -> None:
    """Each counts the machine's."""

    async def scene() -> None:
        given = os.sched_getaffinity(0)
        async with opened("exclusive") as doctor:
            one, other = [await bound(doctor, rank, is_asked=True) for rank in range(2)]
            assert one.processors and other.processors and not one.processors & other.processors
            assert one.processors | other.processors <= given
            assert all(each.of_threads == each.processors for each in (one, other)), "no thread is elsewhere"
            assert one.cores == len(given), "what others are told of the machine does not change"
            assert one.threads == other.threads == len(given) // 2, "nor what a sum depends on"
            local = doctor.coordinator.local
            assert local is not None
            os.kill(doctor.state.ranks[1].facts.pid, signal.SIGKILL)
            await local.start("local-1")
            process = local._workers["local-1"].process
            while process.pid is None or os.sched_getaffinity(process.pid) != other.processors:
                await asyncio.sleep(0.05)
            local.renew_no_more()

    asyncio.run(scene())


def test_nobody_is_bound_where_it_is_not_asked_for() -> None:
    one, other = workers_bound("none")
    assert one.processors == other.processors == os.sched_getaffinity(0)


def test_by_itself_a_machine_of_one_numa_node_is_left_to_its_scheduler() -> None:
    if len(numa_nodes(read_processors().usable)) > 1:
        pytest.skip("this machine has several")
    one, other = workers_bound("auto")
    assert one.processors == other.processors == os.sched_getaffinity(0)
