"""A node whose coordinator is gone: what it says while it waits for another, what it tells that one, when it ends."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.unit.cluster.kits import facts
from tllm.cluster.connection import Unreachable
from tllm.cluster.messages import Attached, Cancel, Failure, Heartbeat, Message, Outputs, Shutdown, Stop
from tllm.core.errors import INTERRUPTED, ClusterError
from tllm.core.timing import AwakeClock
from tllm.engine.driver import CancelRequest
from tllm.node.roles import control as control_module
from tllm.node.roles.control import Control, HeartbeatExchange
from tllm.spec.request import Output, TokenLogprobs

REJOIN = 0.3


class Gone:
    """The channel to a coordinator that says something, and is gone."""

    heard = 0.0

    def __init__(self, *messages: Message) -> None:
        self.messages = messages

    async def run(self, acts: dict[type, Any]) -> None:
        for message in self.messages:
            await acts[type(message)](message)

    def post(self, message: Message) -> None:
        """Nobody hears it."""

    def abort(self) -> None:
        """It is gone already."""

    async def close(self) -> None:
        """There is nothing to close."""


class Node:
    """What the control thread asks of its node, which has had rank 2 in epoch 7."""

    outlives = True
    ends_with_starter = interrupted = False

    def last_place(self) -> tuple[int, int | None]:
        return 7, 2

    def role_taken(self) -> None:
        """It has none."""

    def heartbeat(self) -> Heartbeat:
        return Heartbeat()

    def command(self, command: object) -> None:
        """It drives nothing."""

    def interrupt(self) -> None:
        self.interrupted = True


class Fetch:
    async def follow(self, channel: object, address: object) -> None:
        """It brings nothing."""

    async def close(self) -> None:
        """It has nothing."""


class Clock:
    """The node's, which stands still until nobody was found."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(control_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(control_module, "REJOIN_EVERY", 0.01)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def places(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """What a node told each coordinator that it looked for; the first stops the run, the second is there only once."""
    told: list[tuple[int, int | None]] = []

    async def attach(
        address: object, identity: object, its: object, epoch: int = 0, rank: int | None = None, role: object = None
    ) -> object:
        told.append((epoch, rank))
        if len(told) > 2:
            clock.now += REJOIN / 2
            raise Unreachable("nobody listens there")
        return Gone(*[Stop()][: len(told) % 2]), Attached("c", 9.0, 9.0)

    monkeypatch.setattr(control_module, "attach", attach)
    return told


def test_what_many_prompts_came_to_at_once_goes_in_several_messages() -> None:
    """All together could be more than a message holds."""
    sent = list[Outputs]()
    plain = [Output(request_id=name, token_ids=(1,)) for name in "ab"]
    large = [msgspec.structs.replace(one, prompt_logprobs=(None, TokenLogprobs(1, -1.0))) for one in plain]
    for outputs in (plain, [plain[0], large[1]], large):
        Control.deliver(SimpleNamespace(post=sent.append), 3, outputs)  # type: ignore[arg-type]
    assert [len(message.outputs) for message in sent] == [2, 1, 1, 1, 1]
    assert [one for message in sent for one in message.outputs] == [*plain, plain[0], large[1], *large]


def test_a_node_waits_for_its_coordinator_by_name_and_gives_up_in_time(
    places: list[tuple[int, int | None]], caplog: pytest.LogCaptureFixture
) -> None:
    arguments: Any = (("box", 7000), None, facts("east"), Node(), Fetch(), REJOIN)
    with caplog.at_level(logging.WARNING, "tllm.node"):
        control = Control(*arguments)
        assert control.inbox.orders.get(timeout=20) is None, "it is to end"
        control.close()
    assert places[:2] == [(0, None), (7, 2)] and places[2:] == [(7, 2)] * 2, "as long as there is time"
    assert not control.inbox.stopped.is_set(), "one that has ended asked for that, the next did not"
    went = "the coordinator went away"
    waits = f"{went}; waits 0.3 s for it, or another of its cluster, to be at box:7000 again"
    assert [record.message for record in caplog.records] == [waits] * 2
    assert control.error is not None
    assert control.error.message == f"{went}, and none was at box:7000 again within 0.3 s"


def test_a_node_whose_address_changed_says_so(
    places: list[tuple[int, int | None]], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be found, and no other node could reach it."""

    def check(host: str, really: Callable[[str], None] = control_module.check_own) -> None:
        clock.now += REJOIN / 2
        really(host)

    monkeypatch.setattr(control_module, "check_own", check)
    moved = msgspec.structs.replace(facts("east"), host="192.0.2.77")
    arguments: Any = (("box", 7000), None, moved, Node(), Fetch(), REJOIN)
    control = Control(*arguments)
    assert control.inbox.orders.get(timeout=20) is None, "it is to end"
    control.close()
    assert places == [(0, None)], "no coordinator is told of an address that is not there"
    assert control.error is not None and "192.0.2.77, which is not its address any more" in control.error.message


class Faulty(Node):
    """A node with a fault of ours, in its heartbeats or in what it does with a command."""

    def __init__(self, beats: bool) -> None:
        self.beats = beats

    def heartbeat(self) -> Heartbeat:
        if self.beats:
            raise RuntimeError("dictionary changed size during iteration")
        return Heartbeat()

    def command(self, command: object) -> None:
        if isinstance(command, CancelRequest):
            raise RuntimeError("there is no driver")


class Open(Gone):
    """The channel to a coordinator that says something, and stays until it is told that the node is lost. `heard` is
    what it is told."""

    def __init__(self, *messages: Message) -> None:
        super().__init__(*messages)
        self.heard = list[Message]()
        self.over = asyncio.Event()

    async def run(self, acts: dict[type, Any]) -> None:
        await super().run(acts)
        await self.over.wait()

    def post(self, message: Message) -> None:
        self.heard.append(message)

    async def send(self, message: Message) -> None:
        self.post(message)
        self.over.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("beats", [True, False], ids=["heartbeats", "a message"])
def test_a_fault_of_the_control_thread_ends_the_node_and_the_coordinator_hears_of_it(
    beats: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    channel = Open(*[Cancel("r")][beats:])

    async def attach(*of: object) -> object:
        return channel, Attached("c", 0.01, 9.0)

    monkeypatch.setattr(control_module, "attach", attach)
    arguments: Any = (("box", 7000), None, facts("east"), Faulty(beats), Fetch(), REJOIN)
    control = Control(*arguments)
    assert control.inbox.orders.get(timeout=20) is None, "it is to end"
    assert "RuntimeError: " in caplog.text, "also where the process ends before the thread can"
    control.close()
    said = "its control thread failed, as its log says"
    assert control.error is not None and control.error.message == said
    assert [message.message for message in channel.heard if isinstance(message, Failure)] == [said]


def test_a_node_that_is_told_to_leave_joins_no_coordinator_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have a part in one more epoch, and be lost with it."""
    channels = list[Open]()

    async def attach(*of: object) -> object:
        channels.append(Open())
        return channels[-1], Attached("c", 9.0, 9.0)

    monkeypatch.setattr(control_module, "attach", attach)
    arguments: Any = (("box", 7000), None, facts("east"), Node(), Fetch(), REJOIN)
    control = Control(*arguments)
    control.leave()
    assert control.inbox.orders.get(timeout=20) is None, "it is to end"
    control.close()
    assert control.error is None
    (channel,) = channels
    assert [message.message for message in channel.heard if isinstance(message, Failure)] == [control.reason]


def test_a_node_that_is_to_end_at_once_knows_whether_its_coordinator_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_unfinished in (True, False):
        shutdown = Shutdown("why it ends", is_unfinished)

        async def attach(*of: object, message: Message = shutdown) -> object:
            return Gone(message), Attached("c", 9.0, 9.0)

        monkeypatch.setattr(control_module, "attach", attach)
        node = Node()
        arguments: Any = (("box", 7000), None, facts("east"), node, Fetch(), REJOIN)
        control = Control(*arguments)
        assert control.inbox.orders.get(timeout=20) is None, "it is to end"
        control.close()
        assert control.reason == "why it ends"
        assert control.inbox.is_unfinished is is_unfinished is (control.error is None)
        assert node.interrupted


def test_a_coordinator_that_started_the_node_is_waited_for_where_no_other_can_take_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`kill -STOP` of `tllm train` alone ended its workers after 15 s, and with them the steps in their memory."""
    now, aborted = 0.0, list[float]()

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 100.0:
            raise TimeoutError

    monkeypatch.setattr(control_module, "AwakeClock", lambda every: AwakeClock(every, lambda: now))
    monkeypatch.setattr(control_module, "asyncio", SimpleNamespace(sleep=sleep))
    channel: Any = SimpleNamespace(post=lambda message: None, abort=lambda: aborted.append(now), heard=0.0)
    node, first = Node(), list[float]()
    for node.ends_with_starter in (False, True):
        for replicas in ((), ("a", "b")):
            now, finder = 0.0, SimpleNamespace(replicas=replicas)
            with pytest.raises(TimeoutError):
                asyncio.run(HeartbeatExchange(channel, Attached("c", 0.5, 5.0), node, finder).run())  # type: ignore[arg-type]
            first.append(min(aborted, default=math.inf))
            aborted.clear()
    assert first == [15.5, 5.5, math.inf, 5.5]


@pytest.mark.parametrize(("is_unfinished", "code"), [(True, INTERRUPTED), (False, ClusterError.exit_code)])
def test_a_node_whose_main_thread_does_not_come_back_ends_with_the_code_of_why(
    is_unfinished: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    async def attach(*of: object) -> object:
        return Gone(Shutdown("why it ends", is_unfinished)), Attached("c", 9.0, 9.0)

    monkeypatch.setattr(control_module, "attach", attach)
    monkeypatch.setattr(control_module, "END_SECONDS", 0.01)
    monkeypatch.setattr(control_module, "os", SimpleNamespace(_exit=ended.put))
    arguments: Any = (("box", 7000), None, facts("east"), Node(), Fetch(), REJOIN)
    control = Control(*arguments)
    assert ended.get(timeout=20) == code
    control.close()


def test_a_node_that_was_suspended_does_not_take_its_own_pause_for_the_coordinators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After Ctrl-Z and `fg` the workers of a run ended, and with them the steps that they had in memory."""
    now, late = 0.0, [0.0, 60.0, 0.0, 0.0, 0.0]
    aborted = list[float]()

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + late.pop(0)

    monkeypatch.setattr(control_module, "AwakeClock", lambda every: AwakeClock(every, lambda: now))
    monkeypatch.setattr(control_module, "asyncio", SimpleNamespace(sleep=sleep))
    channel: Any = SimpleNamespace(post=lambda message: None, abort=lambda: aborted.append(now), heard=0.0)
    finder: Any = SimpleNamespace(replicas=("a", "b"))
    exchange = HeartbeatExchange(channel, Attached("c", 2.0, 5.0), Node(), finder)
    with pytest.raises(IndexError):
        asyncio.run(exchange.run())
    assert aborted == [68.0, 70.0], "2 s before the pause and 4 after it"
    assert exchange.silence == "the coordinator has been silent for more than 5 s"


def test_a_long_message_that_is_on_its_way_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that read its weights over a slow line took the coordinator for lost that sent them."""
    now, aborted = 0.0, list[float]()
    channel: Any = SimpleNamespace(post=lambda message: None, abort=lambda: aborted.append(now), heard=0.0)

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        channel.heard = min(now, 20.0)
        if now > 60.0:
            raise TimeoutError

    monkeypatch.setattr(control_module, "AwakeClock", lambda every: AwakeClock(every, lambda: now))
    monkeypatch.setattr(control_module, "asyncio", SimpleNamespace(sleep=sleep))
    finder: Any = SimpleNamespace(replicas=("a", "b"))
    with pytest.raises(TimeoutError):
        asyncio.run(HeartbeatExchange(channel, Attached("c", 0.5, 5.0), Node(), finder).run())
    assert aborted[0] == 25.5, "5 s after the last of it"
