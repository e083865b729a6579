"""What the coordinator says of its nodes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from tests.unit.cluster.kits import facts
from tllm.cluster.channel import Channel
from tllm.cluster.heartbeat import BEAT_SECONDS, LATE_SECONDS
from tllm.cluster.messages import Heartbeat
from tllm.cluster.state import NodeHeard, NodeJoined
from tllm.core.errors import ClusterError, ConfigError, TllmError
from tllm.core.timing import AwakeClock
from tllm.node.coordinator import membership as members_module
from tllm.node.coordinator.membership import Membership, ProbeResult, Surroundings


async def lend(channel: Channel, node: str) -> None:
    raise AssertionError("nobody borrows here")


class Clock:
    """The coordinator's, which the test moves. `looks`: how often it was looked at, as each turn of `watch` does."""

    def __init__(self) -> None:
        self.now, self.looks = 1000.0, 0

    def __call__(self) -> float:
        self.looks += 1
        return self.now

    async def turns(self) -> None:
        """Wait until `watch` has looked at all nodes some more times."""
        until = self.looks + 5
        while self.looks < until:
            await asyncio.sleep(0.001)


async def has_ended(address: object) -> ProbeResult:
    return ProbeResult("its process has ended", False)


def joined(*of: object) -> tuple[Membership, Clock]:
    clock, members = Clock(), Membership(*of)  # type: ignore[arg-type]
    members.surroundings = Surroundings(AwakeClock(BEAT_SECONDS, clock), has_ended)
    return members, clock


@contextlib.asynccontextmanager
async def watched(members: Membership) -> AsyncIterator[None]:
    watch = asyncio.create_task(members.watch())
    yield
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "BEAT_SECONDS", BEAT_SECONDS / 100)


@pytest.mark.parametrize(("lost_after", "lost"), [(4.0, ["silent"]), (60.0, [])])
def test_a_silent_node_is_lost_after_what_was_asked(lost_after: float, lost: list[str]) -> None:
    told: list[str] = []

    async def scene() -> None:
        members, clock = joined(
            "c", lambda node: {}, lambda node, error: told.append(node), lambda: None, lend, lost_after
        )
        members.record(NodeJoined("silent", facts("silent"), clock.now - 4.5))
        members.record(NodeJoined("well", facts("well"), clock.now))
        async with watched(members):
            await clock.turns()

    asyncio.run(scene())
    assert told == lost


def test_a_node_that_beats_while_its_machine_is_asked_is_not_lost() -> None:
    told: list[str] = []

    async def scene() -> None:
        members, clock = joined("c", lambda node: {}, lambda node, error: told.append(node), lambda: None, lend)

        async def beats_meanwhile(address: object) -> ProbeResult:
            members.record(NodeHeard("late", Heartbeat(), clock.now))
            return ProbeResult("nothing answers", False)

        members.surroundings = Surroundings(AwakeClock(BEAT_SECONDS, clock), beats_meanwhile)
        members.record(NodeJoined("late", facts("late"), clock.now - 6.0))
        async with watched(members):
            await clock.turns()

    asyncio.run(scene())
    assert told == []


@pytest.mark.parametrize(("silent_for", "lost"), [(9.0, []), (11.0, ["stopped"])])
def test_of_very_many_nodes_one_whose_machine_answers_has_more_heartbeats_to_miss(
    silent_for: float, lost: list[str]
) -> None:
    told: list[str] = []

    async def answers(address: object) -> ProbeResult:
        return ProbeResult("its machine answers and its process does not", True)

    async def scene() -> None:
        members, clock = joined("c", lambda node: {}, lambda node, error: told.append(node), lambda: None, lend)
        members.surroundings = Surroundings(AwakeClock(BEAT_SECONDS, clock), answers)
        members.interval.grow(10_000)  # each beats every 2.5 s: asked after 5, lost after 10
        members.record(NodeJoined("stopped", facts("stopped"), clock.now - silent_for))
        async with watched(members):
            await clock.turns()

    asyncio.run(scene())
    assert told == lost


def test_each_of_very_many_nodes_is_sent_one_heartbeat_in_an_interval() -> None:
    async def scene() -> None:
        members, clock = joined("c", lambda node: {}, lambda node, error: None, lambda: None, lend)
        sent = Counter[str]()
        channels = {str(i): SimpleNamespace(post_frame=lambda beat, i=i: sent.update([str(i)])) for i in range(8)}
        members.channels.update(cast(dict[str, Channel], channels))
        members.interval.grow(6_000)  # three turns make an interval, at whose end all nodes are looked at
        async with watched(members):
            await clock.turns()
        assert sent.keys() == channels.keys()
        assert max(sent.values()) - min(sent.values()) <= 1 and abs(sent["0"] - clock.looks) <= 1

    asyncio.run(scene())


def test_after_it_was_suspended_a_coordinator_gives_its_nodes_time_to_beat(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever suspends both, as Ctrl-Z does a run with its workers, found them lost, with what they had in memory."""
    told: list[str] = []

    async def scene() -> None:
        members, clock = joined("c", lambda node: {}, lambda node, error: told.append(node), lambda: None, lend, 4.0)
        for node in ("ended", "well"):
            members.record(NodeJoined(node, facts(node), clock.now))
        async with watched(members):
            await clock.turns()
            clock.now += 60.0
            await clock.turns()
            assert told == []
            for _ in range(9):
                clock.now += 0.5
                members.record(NodeHeard("well", Heartbeat(), clock.now))
                await clock.turns()

    asyncio.run(scene())
    assert told == ["ended"], "who still says nothing is"
    assert all("ended" in message for message in caplog.messages), "and that one is late by then"


def test_a_late_node_is_named_to_the_operator_once_each_time(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        members, clock = joined("c", lambda node: {}, lambda node, error: None, lambda: None, lend)
        members.record(NodeJoined("late", facts("late"), clock.now - LATE_SECONDS - 0.5))
        members.record(NodeJoined("well", facts("well"), clock.now))
        async with watched(members):
            await clock.turns()
            assert [message.rpartition(" for ")[0] for message in caplog.messages] == ["node late has been silent"]
            members.record(NodeHeard("late", Heartbeat(), clock.now))
            await clock.turns()
            members.record(NodeJoined("late", facts("late"), clock.now - LATE_SECONDS - 1.0))
            await clock.turns()
            assert len(caplog.messages) == 2
            members.end()
            members.record(NodeJoined("well", facts("well"), clock.now - LATE_SECONDS - 1.0))
            await asyncio.sleep(BEAT_SECONDS / 10)
            assert len(caplog.messages) == 2, "who was told to end is not late"

    asyncio.run(scene())


def test_one_that_takes_more_than_it_was_given_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        members, clock = joined("c", lambda node: {}, lambda node, error: None, lambda: None, lend)
        given = msgspec.structs.replace(facts("greedy"), is_given=True, is_shared=False, memory_bytes=100)
        members.record(NodeJoined("greedy", given, clock.now))
        async with watched(members):
            for held in (100, 101, 99, 102):
                members.record(NodeHeard("greedy", Heartbeat(rss_bytes=held), clock.now))
                await clock.turns()
                assert len(caplog.messages) == (held != 100 or bool(caplog.messages))

    asyncio.run(scene())
    (told,) = caplog.messages
    assert told.startswith("node greedy holds 101 bytes of memory and was given 100: give it more")


@pytest.mark.parametrize(
    ("error", "level"),
    [(ClusterError("a went away"), logging.WARNING), (ConfigError("rows.jsonl, line 2: …"), logging.INFO)],
)
def test_what_ends_the_work_is_no_warning_of_a_lost_node_too(
    error: TllmError, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The command ends with a row's fault and says it: a machine's fault alone is news of its own."""

    async def scene() -> None:
        members, clock = joined("c", lambda node: {}, lambda node, error: None, lambda: None, lend, 5.0)
        members.record(NodeJoined("a", facts("a"), clock.now))
        await members.mark_lost("a", error)

    with caplog.at_level(logging.INFO, "tllm"):
        asyncio.run(scene())
    assert [(record.levelno, record.message) for record in caplog.records] == [(level, f"lost a: {error.message}")]
