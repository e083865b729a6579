"""A first machine that is deposed before its cluster has done anything, as while the first epoch loads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tllm.cluster.certificates import Authority
from tllm.cluster.connection import Address
from tllm.cluster.consensus import replica as replica_module
from tllm.cluster.consensus.replica import Deposed, Replica
from tllm.cluster.consensus.replicated_state import CoordinatorBegan
from tllm.cluster.consensus.timing import RaftTiming
from tllm.cluster.join_token import TokenBook
from tllm.core.tasks import end_tasks
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.replication.coordinated_elsewhere import Succeeded
from tllm.node.replication.first_replica import replicated

HERE = "127.0.0.1"
NEXT: Address = (HERE, 4711)


def job_of(authority: Authority) -> Any:
    """What is to be coordinated, of which nothing runs yet."""
    coordinator: Any = SimpleNamespace(
        state=SimpleNamespace(plan=None),
        control_server=SimpleNamespace(port=4242),
        tokens=TokenBook(authority.fingerprint),
        replication=None,
        let_go=lambda: None,
    )
    coordinator.find_successor = lambda *words: Coordinator.find_successor(coordinator, *words)
    return SimpleNamespace(coordinator=coordinator, recovery=SimpleNamespace(policy="replan"))


async def elect_another(stack: AsyncExitStack, replica: Replica, authority: Authority) -> None:
    """Let two more replicas have the state, and one of them coordinate."""
    others = [Replica(authority.identity(name), HERE, (HERE, 0)) for name in ("b", "c")]
    for other in others:
        running = asyncio.create_task(other.run())
        stack.push_async_callback(end_tasks, running)
        replica.raft.learn(other.place, replica.now())
        await holds(replica, lambda: replica.raft.has_learned(other.place.id))  # noqa: B023
        await replica.change((*replica.raft.log.configuration, other.place))
    assert await replica.hand_over(20.0)
    while not (led := [other for other in others if other.leads]):
        await asyncio.sleep(0.01)
    await led[0].propose(CoordinatorBegan(led[0].term, *NEXT))


async def holds(replica: Replica, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        await replica.until(condition)


@pytest.fixture(autouse=True)
def _no_replica_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """None stands for election by itself, however long this process does not run."""
    monkeypatch.setattr(replica_module, "RaftTiming", partial(RaftTiming, election=60.0))


@pytest.mark.parametrize("seconds", [0.0, 20.0], ids=["does not join", "joins"])
def test_who_coordinates_then_is_found(seconds: float) -> None:
    async def scene() -> None:
        authority = Authority.create()
        job = job_of(authority)
        options = ClusterOptions(address=(HERE, 0), lost_after=120.0, replicas=3, successor_seconds=seconds)
        async with asyncio.timeout(50), AsyncExitStack() as stack:

            async def depose() -> None:
                async with replicated(job, authority, options):
                    await elect_another(stack, job.coordinator.replication._replica, authority)
                    raise Deposed("it coordinates no more")

            with pytest.raises(Deposed, match="coordinates no more") as raised:
                await depose()
            if not seconds:
                assert not isinstance(raised.value, Succeeded)
                return
            assert isinstance(raised.value, Succeeded)
            assert (raised.value.cluster.address, raised.value.door) == (NEXT, (HERE, 4242))

    asyncio.run(scene())


def test_it_is_looked_for_once() -> None:
    """By the HTTP server, which refuses requests meanwhile, and not for as long again after it."""

    async def scene() -> None:
        authority = Authority.create()
        options = ClusterOptions(address=(HERE, 0), replicas=3, successor_seconds=60.0)
        deposed = Deposed("it coordinates no more")
        deposed.was_sought = True
        with pytest.raises(Deposed) as raised:
            async with asyncio.timeout(30), replicated(job_of(authority), authority, options):
                raise deposed
        assert raised.value is deposed

    asyncio.run(scene())
