"""What the coordinator says of its nodes."""

from __future__ import annotations

import asyncio
import contextlib
import time

import msgspec
import pytest

from tests.unit.cluster.kits import facts
from tllm.cluster.channel import Channel
from tllm.cluster.heartbeat import BEAT_SECONDS, LATE_SECONDS
from tllm.cluster.messages import Heartbeat
from tllm.cluster.state import NodeHeard, NodeJoined
from tllm.node.coordinator import membership as members_module
from tllm.node.coordinator.membership import Membership


async def lend(channel: Channel, node: str) -> None:
    raise AssertionError("nobody borrows here")


@pytest.mark.parametrize(("lost_after", "lost"), [(4.0, ["silent"]), (60.0, [])])
def test_a_silent_node_is_lost_after_what_was_asked(
    lost_after: float, lost: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_module, "BEAT_SECONDS", BEAT_SECONDS / 50)
    told: list[str] = []

    async def scene() -> None:
        members = Membership(
            "c", lambda node: {}, lambda node, error: told.append(node), lambda: None, lend, lost_after
        )
        members.record(NodeJoined("silent", facts("silent"), time.monotonic() - 4.5))
        members.record(NodeJoined("well", facts("well"), time.monotonic()))
        watch = asyncio.create_task(members.watch())
        await asyncio.sleep(BEAT_SECONDS)
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch

    asyncio.run(scene())
    assert told == lost


def test_a_late_node_is_named_to_the_operator_once_each_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_module, "BEAT_SECONDS", BEAT_SECONDS / 50)

    async def scene() -> None:
        members = Membership("c", lambda node: {}, lambda node, error: None, lambda: None, lend)
        members.record(NodeJoined("late", facts("late"), time.monotonic() - LATE_SECONDS - 0.5))
        members.record(NodeJoined("well", facts("well"), time.monotonic()))
        watch = asyncio.create_task(members.watch())
        await asyncio.sleep(BEAT_SECONDS / 5)
        assert [message.rpartition(" for ")[0] for message in caplog.messages] == ["node late has been silent"]
        members.record(NodeHeard("late", Heartbeat(), time.monotonic()))
        await asyncio.sleep(BEAT_SECONDS / 5)
        members.record(NodeJoined("late", facts("late"), time.monotonic() - LATE_SECONDS - 1.0))
        await asyncio.sleep(BEAT_SECONDS / 5)
        assert len(caplog.messages) == 2
        members.end()
        members.record(NodeJoined("well", facts("well"), time.monotonic() - LATE_SECONDS - 1.0))
        await asyncio.sleep(BEAT_SECONDS / 5)
        assert len(caplog.messages) == 2, "who was told to end is not late"
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch

    asyncio.run(scene())


def test_one_that_takes_more_than_it_was_given_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_module, "BEAT_SECONDS", BEAT_SECONDS / 50)

    async def scene() -> None:
        members = Membership("c", lambda node: {}, lambda node, error: None, lambda: None, lend)
        given = msgspec.structs.replace(facts("greedy"), is_given=True, is_shared=False, memory_bytes=100)
        members.record(NodeJoined("greedy", given, time.monotonic()))
        watch = asyncio.create_task(members.watch())
        for held in (100, 101, 99, 102):
            members.record(NodeHeard("greedy", Heartbeat(rss_bytes=held), time.monotonic()))
            await asyncio.sleep(BEAT_SECONDS / 5)
            assert len(caplog.messages) == (held != 100 or bool(caplog.messages))
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch

    asyncio.run(scene())
    (told,) = caplog.messages
    assert told.startswith("node greedy holds 101 bytes of memory and was given 100: give it more")
