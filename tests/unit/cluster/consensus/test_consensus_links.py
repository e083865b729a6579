from __future__ import annotations

import asyncio

import pytest

from tllm.cluster.certificates import Authority
from tllm.cluster.consensus import consensus_links
from tllm.cluster.consensus.consensus_links import ConsensusLinks
from tllm.cluster.consensus.raft_messages import TimeoutNow
from tllm.cluster.messages import ReplicaPlace

HERE, THERE = (ReplicaPlace(f"node-{letter}/{'0' * 16}", "127.0.0.1", 9) for letter in "ab")


def test_a_link_that_a_fault_of_ours_ends_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = asyncio.Event()

    async def connect(*_: object) -> None:
        tried.set()
        raise ValueError("a fault of ours")

    async def scene() -> None:
        links = ConsensusLinks(Authority.create().identity("node-a"))
        links.post(THERE, TimeoutNow(1, HERE))
        await tried.wait()
        await links.close()

    monkeypatch.setattr(consensus_links, "connect_tls", connect)
    asyncio.run(scene())
    assert f"the link to {THERE.id} failed" in caplog.text and "a fault of ours" in caplog.text
