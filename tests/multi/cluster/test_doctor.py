"""A doctor's visit to worker processes of this machine, and the profile that is made with its help."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.support.cluster.processes import descendants, wait_until_gone
from tllm.cli.commands.profile import measured
from tllm.core.errors import ClusterError
from tllm.node.doctor.doctor import open_doctor
from tllm.node.machine.machine_facts import ClusterProbe

pytestmark = pytest.mark.timeout(300)
LIMIT = 150.0
"""Seconds, on a machine that does much else: each of two processes measures what it can. `test_doctor_hosts`: three."""


def test_every_node_and_every_way() -> None:
    async def scene() -> ClusterProbe:
        async with asyncio.timeout(LIMIT), open_doctor(2, measure_seconds=0.3, way_seconds=0.3) as doctor:
            return await doctor.probe()

    found = asyncio.run(scene())
    names = ["local-0", "local-1"]
    assert [node.node for node in found.nodes] == names
    assert len({node.versions["source"] for node in found.nodes}) == 1
    assert [(way.source, way.target) for way in found.ways] == [(a, b) for a in names for b in names if a != b]
    assert all(way.measured is not None and way.measured.bandwidth > 0 for way in found.ways)
    assert wait_until_gone(descendants()) == []


def test_a_node_that_is_killed_ends_the_visit_by_its_name() -> None:
    async def scene() -> None:
        async with open_doctor(2, measure_seconds=20.0, way_seconds=0.3) as doctor:
            asked = asyncio.create_task(doctor.probe())
            await asyncio.sleep(0.2)
            os.kill(doctor.state.ranks[1].facts.pid, signal.SIGKILL)
            await asked

    async def limited() -> None:
        async with asyncio.timeout(LIMIT):
            await scene()

    with pytest.raises(ClusterError, match="local-1"):
        asyncio.run(limited())
    assert wait_until_gone(descendants()) == []


@pytest.mark.soak  # `test_every_node_and_every_way` measures all links
def test_a_profile_has_a_link() -> None:
    found, _ = measured(1.0, None)
    assert found.wire is not None
    assert found.wire.bandwidth > 0
    assert found.products
