from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tests.unit.cluster.kits import facts
from tllm.cluster.channel import HEAD, ONE_WAY, QUESTION, Channel, Gone
from tllm.cluster.consensus.raft_messages import FindCoordinator
from tllm.cluster.messages import (
    Attach,
    FromNode,
    Heartbeat,
    Load,
    Message,
    Progress,
    ReplicaPlace,
    ReplicaServes,
    ServeReplica,
    Shutdown,
    Start,
    Started,
    ToNode,
)
from tllm.core.errors import ClusterError, PlanError


class Pipe(asyncio.Transport):
    """A transport whose writes feed another end's reader."""

    def __init__(self, target: asyncio.StreamReader) -> None:
        super().__init__()
        self.target = target
        self.closed = False

    def write(self, data: Any) -> None:
        if not self.closed:
            self.target.feed_data(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.target.feed_eof()

    abort = close


ends: list[Channel] = []


def end(reader: asyncio.StreamReader, other: asyncio.StreamReader, accepts: Any, peer: str, limit: int) -> Channel:
    loop = asyncio.get_running_loop()
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    writer = asyncio.StreamWriter(Pipe(other), protocol, reader, loop)
    ends.append(Channel(reader, writer, peer, accepts, limit))
    return ends[-1]


def pair(limit: int = 10_000) -> tuple[Channel, Channel, asyncio.StreamReader]:
    """A coordinator's end, a node's end, and where what the node sends arrives."""
    here, there = asyncio.StreamReader(), asyncio.StreamReader()
    return end(here, there, FromNode, "node a", limit), end(there, here, ToNode, "coordinator", limit), here


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        try:
            async with asyncio.timeout(30):
                await scene()
        finally:
            while ends:
                ends.pop().abort()

    asyncio.run(limited())


def test_a_question_gets_its_own_answer_whatever_the_order() -> None:
    async def start(message: Start) -> Started:
        await asyncio.sleep(0.01 * (3 - message.epoch))  # the first asked is the last answered
        return Started(message.epoch)

    async def scene() -> None:
        coordinator, node, _ = pair()
        runs = [asyncio.create_task(node.run({Start: start})), asyncio.create_task(coordinator.run({}))]
        answers = await asyncio.gather(*(coordinator.ask(Start(epoch), 20.0) for epoch in range(3)))
        assert [answer.rank for answer in answers] == [0, 1, 2]
        coordinator.abort()
        node.abort()
        await asyncio.gather(*runs)

    play(scene)


def test_a_stream_yields_each_item_and_then_ends() -> None:
    async def load(message: Load) -> AsyncGenerator[Progress, None]:
        for done in range(3):
            yield Progress(done, 3)

    async def scene() -> None:
        coordinator, node, _ = pair()
        runs = [asyncio.create_task(node.run({Load: load})), asyncio.create_task(coordinator.run({}))]
        assert [item.done async for item in coordinator.stream(Load(1), 20.0)] == [0, 1, 2]
        coordinator.abort()
        node.abort()
        await asyncio.gather(*runs)

    play(scene)


def test_a_stream_that_nobody_takes_any_more_is_closed_before_the_channel_ends() -> None:
    """Else the event loop closes it at its own end, beside the generators that it reads, and they fail."""
    closed: list[int] = []

    async def load(message: Load) -> AsyncGenerator[Progress, None]:
        try:
            for done in range(3):
                yield Progress(done, 3)
                node.abort()  # the second is not taken
        finally:
            closed.append(message.epoch)

    async def scene() -> None:
        nonlocal node
        coordinator, node, _ = pair()
        run = asyncio.create_task(coordinator.run({}))
        await coordinator.write(QUESTION, 1, Load(7))
        with pytest.raises(Gone):
            await node.run({Load: load})
        assert closed == [7]
        await run

    node: Channel
    play(scene)


def test_an_error_for_users_is_an_answer_and_the_channel_goes_on() -> None:
    async def start(message: Start) -> Started:
        if message.epoch == 0:
            raise PlanError("three ranks of two", "use two")
        return Started(1)

    async def scene() -> None:
        coordinator, node, _ = pair()
        runs = [asyncio.create_task(node.run({Start: start})), asyncio.create_task(coordinator.run({}))]
        with pytest.raises(PlanError, match="three ranks of two") as caught:
            await coordinator.ask(Start(0), 20.0)
        assert caught.value.hint == "use two"
        assert await coordinator.ask(Start(1), 20.0) == Started(1)
        coordinator.abort()
        node.abort()
        await asyncio.gather(*runs)

    play(scene)


def test_a_refusal_is_told_once_though_it_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    """A node's HTTP server asks twice a second how the engine is, also while a model is loaded for minutes."""
    reasons = iter(["not yet", "not yet", "not yet", "never", "not yet"])

    async def start(message: Start) -> Started:
        raise ClusterError(next(reasons))

    async def scene() -> None:
        coordinator, node, _ = pair()
        runs = [asyncio.create_task(node.run({Start: start})), asyncio.create_task(coordinator.run({}))]
        for _ in range(5):
            with pytest.raises(ClusterError):
                await coordinator.ask(Start(1), 20.0)
        coordinator.abort()
        node.abort()
        await asyncio.gather(*runs)

    with caplog.at_level("INFO", "tllm.cluster"):
        play(scene)
    assert [message.partition(": ")[2] for message in caplog.messages] == ["not yet", "never", "not yet"]


@pytest.mark.parametrize("kind", [ONE_WAY, QUESTION])
def test_a_fault_of_ours_ends_its_channel_loudly(kind: int) -> None:
    async def start(message: Start) -> Started:
        raise ZeroDivisionError

    async def scene() -> None:
        coordinator, node, _ = pair()
        await coordinator.write(kind, 1, Start(0))
        with pytest.raises(ZeroDivisionError):
            await node.run({Start: start})

    play(scene)


@pytest.mark.parametrize("sent", [HEAD.size - 1, HEAD.size, HEAD.size + 1])
def test_a_message_that_is_cut_off_is_no_farewell(sent: int) -> None:
    async def scene() -> None:
        coordinator, _, came = pair()
        came.feed_data((HEAD.pack(3, ONE_WAY, 0) + b"abc")[:sent])
        came.feed_eof()
        with pytest.raises(ClusterError, match="stopped in the middle of a message"):
            await coordinator.receive()
        assert coordinator.refused == 0, "it may have been well meant"

    play(scene)


def test_a_question_without_an_answer_ends_at_its_deadline() -> None:
    async def scene() -> None:
        coordinator, _node, _ = pair()
        with pytest.raises(ClusterError, match=r"node a did not answer Start within 0\.05 s"):
            await coordinator.ask(Start(0), 0.05)

    play(scene)


def test_questions_end_when_the_other_end_goes_away() -> None:
    async def scene() -> None:
        coordinator, node, _ = pair()
        run = asyncio.create_task(coordinator.run({}))
        ask = asyncio.create_task(coordinator.ask(Start(0), 60.0))
        await asyncio.sleep(0)
        node.abort()
        with pytest.raises(ClusterError, match="went away before it answered Start"):
            await ask
        await run
        with pytest.raises(ClusterError, match="went away"):
            await coordinator.ask(Start(0), 60.0)

    play(scene)


@pytest.mark.parametrize("kind", [ConnectionResetError, BrokenPipeError])
def test_a_process_that_ended_with_bytes_unread_went_away_as_one_that_closed(kind: type[OSError]) -> None:
    """Linux answers what comes after its end with a reset, which overtakes what it had sent."""

    async def scene() -> None:
        coordinator, _node, arriving = pair()
        run = asyncio.create_task(coordinator.run({}))
        ask = asyncio.create_task(coordinator.ask(Start(0), 60.0))
        await asyncio.sleep(0)
        arriving.set_exception(kind("reset"))
        with pytest.raises(Gone, match="node a went away before it answered Start"):
            await ask
        await run

    play(scene)


def test_nothing_is_sent_to_one_that_went_away() -> None:
    async def scene() -> None:
        coordinator, _node, _ = pair()
        coordinator.abort()
        with pytest.raises(Gone, match="node a went away"):
            await coordinator.send(Shutdown())

    play(scene)


def test_a_channel_that_breaks_otherwise_says_how() -> None:
    async def scene() -> None:
        coordinator, _node, arriving = pair()
        arriving.set_exception(OSError("no route to host"))
        with pytest.raises(ClusterError, match="the channel to node a broke: no route to host"):
            await coordinator.run({})

    play(scene)


def frame(body: bytes, length: int | None = None, kind: int = ONE_WAY) -> bytes:
    return HEAD.pack(len(body) if length is None else length, kind, 0) + body


BEAT = msgspec.msgpack.encode(Heartbeat())


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (frame(b"", length=10_001), "declares a message of 10001 bytes, at most 10000"),
        (frame(b"", length=2**32 - 1), "declares a message of 4294967295 bytes"),
        (frame(b"\xc1" * 8), "8 bytes that are no message"),
        (frame(msgspec.msgpack.encode(Shutdown())), "that are no message"),  # a coordinator's, not a node's
        (frame(msgspec.msgpack.encode({"type": "Heartbeat", "surprise": 1})), "that are no message"),
        (frame(msgspec.msgpack.encode(Attach(1, facts(), epoch=2**32))), "that are no message"),
        (frame(BEAT, kind=9), "kind 9"),
        (frame(msgspec.msgpack.encode(Started(0))), "a Started, which has no place here"),
        (frame(BEAT)[:-1], "in the middle of a message"),
        (frame(BEAT)[:4], "in the middle of a message"),
    ],
)
def test_what_is_not_a_message_ends_the_channel_with_words(raw: bytes, words: str) -> None:
    async def beat(message: Heartbeat) -> None:
        return None

    async def scene() -> None:
        coordinator, _node, arriving = pair()
        arriving.feed_data(raw)
        arriving.feed_eof()
        with pytest.raises(ClusterError, match=words):
            await coordinator.run({Heartbeat: beat})

    play(scene)


def test_an_answer_to_another_question_is_none() -> None:
    """A node that lies, or has a fault, ends its own part and not the coordinator."""

    async def start(message: Start) -> Message:
        return Heartbeat() if message.epoch == 0 else Started(1)

    async def load(message: Load) -> AsyncGenerator[Message, None]:
        yield Progress(1, 2)
        yield Started(1)

    async def scene() -> None:
        coordinator, node, _ = pair()
        runs = [asyncio.create_task(node.run({Start: start, Load: load})), asyncio.create_task(coordinator.run({}))]
        with pytest.raises(ClusterError, match="node a answered Start with a Heartbeat"):
            await coordinator.ask(Start(0), 20.0)
        with pytest.raises(ClusterError, match="node a answered Load with a Started"):
            assert [item.done async for item in coordinator.stream(Load(1), 20.0)] == []
        assert coordinator.refused == 2
        assert await coordinator.ask(Start(1), 20.0) == Started(1), "the channel goes on"
        coordinator.abort()
        node.abort()
        await asyncio.gather(*runs)

    play(scene)


def test_every_name_of_an_answer_is_a_message() -> None:
    assert FindCoordinator.answers == ("CoordinatorFound",), "messages of replicas are among them"
    kinds = Message.__subclasses__()
    assert {name for kind in kinds for name in kind.answers} <= {kind.__name__ for kind in kinds}


def test_an_answer_that_is_too_large_is_refused_and_the_channel_goes_on() -> None:
    async def serve(message: ServeReplica) -> ReplicaServes:
        return ReplicaServes(ReplicaPlace("a/" + "0" * 16, "h" * int(message.election_seconds), 1))

    async def scene() -> None:
        coordinator, node, _ = pair(limit=200)
        runs = [asyncio.create_task(node.run({ServeReplica: serve})), asyncio.create_task(coordinator.run({}))]
        with pytest.raises(ClusterError, match=r"a ReplicaServes of \d+ bytes is too large"):
            await coordinator.ask(ServeReplica(220), 20.0)
        answer = await coordinator.ask(ServeReplica(10), 20.0)
        assert answer.place.host == "h" * 10
        coordinator.abort()
        node.abort()
        await asyncio.gather(*runs)

    play(scene)


def test_a_refusal_that_nobody_is_there_to_hear_is_no_failure_of_the_channel() -> None:
    """A node that goes while its question is refused went away: another error of a node ends the whole work."""

    async def start(message: Start) -> Started:
        node.abort()
        raise PlanError("three ranks of two")

    async def scene() -> None:
        nonlocal node
        coordinator, node, _ = pair()
        await coordinator.write(QUESTION, 1, Start(0))
        with pytest.raises(Gone, match="coordinator went away"):
            await node.run({Start: start})

    node: Channel
    play(scene)


def test_what_is_told_of_a_message_that_is_none_neither_moves_a_cursor_nor_begins_a_line() -> None:
    """It may come from whoever answers a node that joins, and is shown on that machine's terminal."""

    async def scene() -> None:
        coordinator, _node, arriving = pair()
        arriving.feed_data(frame(msgspec.msgpack.encode({"type": "Heartbeat", "\x1b[2J\nall is well": 1})))
        with pytest.raises(ClusterError, match="all is well") as caught:
            await coordinator.receive()
        assert caught.value.message.isprintable()

    play(scene)


def test_a_message_that_is_too_large_is_not_sent() -> None:
    async def scene() -> None:
        coordinator, _node, _ = pair(limit=100)
        with pytest.raises(ClusterError, match="too large"):
            await coordinator.send(Shutdown("x" * 200))

    play(scene)
