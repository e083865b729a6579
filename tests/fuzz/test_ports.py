"""The ports of a node and of the coordinator outlive what is said to them, count it, and take who is expected."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.cluster.fuzz_ports import NodePort, control_port

pytestmark = pytest.mark.timeout(300)

ATTACKS = 120


def test_a_nodes_port() -> None:
    dice = random.Random("a node's port")
    with NodePort() as port:
        for _ in range(ATTACKS):
            port.attack(dice)
        port.check_unharmed()
    assert port.counts["hellos refused"] > ATTACKS / 4 and port.counts["frames refused"] > ATTACKS / 8, port.counts


def test_the_coordinators_port() -> None:
    dice = random.Random("the coordinator's port")

    async def scene() -> None:
        async with control_port() as port:
            for _ in range(ATTACKS):
                await port.attack(dice)
            await port.check_unharmed()
        assert port.counts["guests refused"] > ATTACKS / 4 and port.counts["messages refused"] > ATTACKS / 8, (
            port.counts
        )

    asyncio.run(scene())
