"""A node that cannot take its part is left out by its name, and the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.multi.faults.test_serving_recovery import SIZES, Streams, Truth, model, play, truth
from tests.support.faults.full_disk import no_room
from tests.support.faults.thread_nodes import ThreadNodes
from tllm.cluster.certificates import Authority
from tllm.core.errors import ClusterError
from tllm.node.recovery import recovery as recovery_module
from tllm.node.recovery.left_out import AGAIN_SECONDS
from tllm.node.roles.serving_rank import ServingRank
from tllm.node.serve.open_cluster import open_cluster
from tllm.node.serve.serving import Serving
from tllm.spec.plan import Plan

__all__ = ["model", "truth"]  # fixtures

pytestmark = pytest.mark.timeout(120)

SECONDS = 100.0


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadNodes]:
    made = ThreadNodes("abc", monkeypatch)
    yield made
    made.end()


def placed(cluster: Serving) -> str:
    return "".join(member.node for member in cluster.state.ranks)


async def until_placed(cluster: Serving, names: str) -> None:
    while placed(cluster) != names or not cluster.is_open:
        await asyncio.sleep(0.02)


def let_the_time_pass(cluster: Serving) -> None:
    """After which who is left out may try again."""
    now = cluster.coordinator.members.now
    cluster.recovery.left_out.now = lambda: now() + AGAIN_SECONDS


def test_a_node_that_trusts_nobody_any_more_is_left_out_until_it_does(
    model: Path, truth: Truth, nodes: ThreadNodes, caplog: pytest.LogCaptureFixture
) -> None:
    """As one whose clock is so far ahead that all certificates have expired."""

    async def scene() -> None:
        async with open_cluster(model, "pp=3", SIZES, nodes.options) as cluster:
            order = placed(cluster)
            strange = nodes.workers[order[1]]
            trusted = strange._identity
            strange._identity = replace(trusted, authority=Authority.create().pem)
            streams = Streams(cluster)
            await streams.reach(10)
            cluster.move(Plan.parse("pp=3,layers=2+1+1", 4), order)  # whose links are made anew
            assert await streams.end() == truth
            assert placed(cluster) == order[0] + order[2]
            assert cluster.health().ready and cluster.status()["trouble"].startswith(f"{order[1]} is left out: ")
            strange._identity = trusted
            let_the_time_pass(cluster)
            await until_placed(cluster, order)
            assert await Streams(cluster).end() == truth
            assert cluster.status()["trouble"] == ""

    play(scene, SECONDS)
    assert "out of epoch 4: " in caplog.text and "do not trust each other" in caplog.text


def test_a_node_whose_system_refuses_it_something_is_left_out_and_stays(
    model: Path, truth: Truth, nodes: ThreadNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, poor = ServingRank.__init__, set[str]()

    def make(self: ServingRank, assign: object, identity: object, *rest: object) -> None:
        if identity.name in poor:  # type: ignore[attr-defined]
            raise OSError(24, "Too many open files")
        made(self, assign, identity, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ServingRank, "__init__", make)
    monkeypatch.setattr(recovery_module, "RETRY_SECONDS", 0.2)

    async def scene() -> None:
        async with open_cluster(model, "pp=3", SIZES, nodes.options) as cluster:
            order = placed(cluster)
            poor.add(order[2])
            streams = Streams(cluster)
            await streams.reach(10)
            cluster.move(Plan.parse("pp=3,layers=2+1+1", 4), order)
            assert await streams.end() == truth
            assert placed(cluster) == order[:2]
            assert cluster.status()["trouble"] == f"{order[2]} is left out: Too many open files"
            assert order[2] in cluster.coordinator.members.channels and cluster.recovery.lost_ranks == 0
            poor.update(order)
            cluster.move(Plan.parse("pp=3,layers=1+2+1", 4), order)
            with pytest.raises(ClusterError, match="Too many open files"):
                await Streams(cluster).end()
            poor.clear()
            await until_placed(cluster, order[:2])
            assert await Streams(cluster).end() == truth, "what all of them fail of is nobody's own"

    play(scene, SECONDS)


def test_an_epoch_begins_while_no_disk_takes_a_byte(
    model: Path, truth: Truth, nodes: ThreadNodes, tmp_path: Path
) -> None:
    sizes = msgspec.structs.replace(SIZES, cache_dir=str(tmp_path / "pages"), cache_dir_size=2**30)

    async def scene() -> None:
        async with open_cluster(model, "pp=3", sizes, nodes.options) as cluster:
            streams = Streams(cluster)
            await streams.reach(10)
            with no_room():
                cluster.move(Plan.parse("pp=3,layers=2+1+1", 4), placed(cluster))
                assert await streams.end() == truth
                assert await Streams(cluster).end() == truth
            assert len(placed(cluster)) == 3 and cluster.recovery.lost_ranks == 0

    play(scene, SECONDS)
