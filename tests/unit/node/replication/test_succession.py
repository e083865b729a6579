"""A node that takes the coordinator's place, and what it cannot do."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tllm.cluster.certificates import Authority
from tllm.cluster.consensus.replica import Deposed
from tllm.cluster.consensus.replicated_state import SigningKey
from tllm.core.errors import ConfigError
from tllm.node.replication.succession import Office


async def forever(*_: object) -> None:
    await asyncio.Event().wait()


def nothing(*_: object) -> None:
    """Nobody is told."""


def office() -> Office:
    """One whose cluster has no node that could come."""
    authority = Authority.create()
    work = SimpleNamespace(policy="replan", replicas=3)
    key = SigningKey(authority.pem, authority.key_pem)
    replica: Any = SimpleNamespace(
        term=2,
        state=SimpleNamespace(epoch=3, tokens=(), cluster="c", ranks=("a",), own=(), authority=key, work=work),
    )
    return Office(replica, "a", "127.0.0.1", ("", 0), nothing)


@pytest.mark.parametrize(
    ("ran", "worked", "raised"),
    [
        (None, ConfigError("no tokenizer here"), ConfigError),
        (OSError("no room"), None, OSError),
        (Deposed("another leads"), None, Deposed),
        (None, AssertionError("a fault of ours"), ExceptionGroup),
    ],
)
def test_what_a_successor_fails_of_is_told_as_what_it_is(
    ran: Exception | None, worked: Exception | None, raised: type[Exception]
) -> None:
    """As a group of errors it ended this node's replica, whose vote another successor may need."""

    async def run() -> None:
        await asyncio.sleep(0)
        await (forever() if ran is None else failing(ran))

    async def failing(error: Exception) -> None:
        raise error

    async def work(opened: asyncio.Event) -> bool:
        await (forever() if worked is None else failing(worked))
        return False

    coordinator = SimpleNamespace(
        resume=nothing,
        run=run,
        replication=None,
        control_server=SimpleNamespace(port=1, close=nothing),
        members=SimpleNamespace(abandon=nothing),
        work=SimpleNamespace(lost_after=1.0),
    )
    job: Any = SimpleNamespace(coordinator=coordinator, recovery=SimpleNamespace(until=forever, take_up=nothing))
    with pytest.raises(raised):
        asyncio.run(asyncio.wait_for(office().coordinate(job, work), 10.0))
