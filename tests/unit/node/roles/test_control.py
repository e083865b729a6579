"""A node whose coordinator is gone: what it says while it waits for another, what it tells that one, when it ends."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.unit.cluster.kits import facts
from tllm.cluster.messages import Attached, Heartbeat, Message, Stop
from tllm.core.errors import ClusterError
from tllm.node.roles import control as control_module
from tllm.node.roles.control import Control

REJOIN = 0.3


class Gone:
    """The channel to a coordinator that says something, and is gone."""

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

    def last_place(self) -> tuple[int, int | None]:
        return 7, 2

    def role_taken(self) -> None:
        """It has none."""

    def heartbeat(self) -> Heartbeat:
        return Heartbeat()

    def command(self, command: object) -> None:
        """It drives nothing."""

    def interrupt(self) -> None:
        """It waits for nothing."""


class Fetch:
    async def follow(self, channel: object, address: object) -> None:
        """It brings nothing."""

    async def close(self) -> None:
        """It has nothing."""


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """What a node told each coordinator that it looked for; the first stops the run, the second is there only once."""
    told: list[tuple[int, int | None]] = []

    async def attach(
        address: object, identity: object, its: object, epoch: int = 0, rank: int | None = None, role: object = None
    ) -> object:
        told.append((epoch, rank))
        if len(told) > 2:
            raise ClusterError("nobody listens there")
        return Gone(*[Stop()][: len(told) % 2]), Attached("c", 9.0, 9.0)

    monkeypatch.setattr(control_module, "attach", attach)
    return told


def test_a_node_waits_for_its_coordinator_by_name_and_gives_up_in_time(
    places: list[tuple[int, int | None]], caplog: pytest.LogCaptureFixture
) -> None:
    arguments: Any = (("box", 7000), None, facts("east"), Node(), Fetch(), REJOIN)
    with caplog.at_level(logging.WARNING, "tllm.node"):
        control = Control(*arguments)
        assert control.inbox.orders.get(timeout=20) is None, "it is to end"
        control.close()
    assert places[:2] == [(0, None), (7, 2)] and set(places[2:]) == {(7, 2)} and len(places) > 2
    assert not control.inbox.stopped.is_set(), "one that has ended asked for that, the next did not"
    went = "the coordinator went away"
    waits = f"{went}; waits 0.3 s for it, or another of its cluster, to be at box:7000 again"
    assert [record.message for record in caplog.records] == [waits] * 2
    assert control.error is not None
    assert control.error.message == f"{went}, and none was at box:7000 again within 0.3 s"
