"""Workers of this machine that are asked to be bound: each has cores of its own, with every thread, and computes as
before."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass

import pytest

from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.doctor.doctor import open_doctor
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


def workers_bound(asked: NumaBinding, probed: int) -> list[Bound]:
    """Two workers, of which so many are asked for what they measure."""

    async def scene() -> list[Bound]:
        options = ClusterOptions(local=2, numa_binding=asked)
        async with asyncio.timeout(SECONDS), open_doctor(2, options, measure_seconds=0.1, way_seconds=0.1) as doctor:
            found = []
            for rank, member in enumerate(doctor.state.ranks):
                pid, counted = member.facts.pid, {}
                if rank < probed:
                    probe = await doctor.probe_node(rank)
                    counted = dict(cores=probe.machine.cores, threads=probe.torch.threads)
                threads = [os.sched_getaffinity(int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]
                found.append(Bound(os.sched_getaffinity(pid), set.union(*threads), **counted))
            return found

    return asyncio.run(scene())


def test_each_worker_has_cores_of_its_own_and_counts_those_of_the_machine() -> None:
    given = os.sched_getaffinity(0)
    one, other = workers_bound("exclusive", probed=2)
    assert one.processors and other.processors and not one.processors & other.processors
    assert one.processors | other.processors <= given
    assert all(each.of_threads == each.processors for each in (one, other)), "no thread is elsewhere"
    assert one.cores == len(given), "what others are told of the machine does not change"
    assert one.threads == other.threads == len(given) // 2, "nor what a sum depends on"


def test_nobody_is_bound_where_it_is_not_asked_for() -> None:
    one, other = workers_bound("none", probed=1)
    assert one.processors == other.processors == os.sched_getaffinity(0)
    assert one.threads == len(one.processors) // 2


def test_by_itself_a_machine_of_one_numa_node_is_left_to_its_scheduler() -> None:
    if len(numa_nodes(read_processors().usable)) > 1:
        pytest.skip("this machine has several")
    one, other = workers_bound("auto", probed=0)
    assert one.processors == other.processors == os.sched_getaffinity(0)


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
