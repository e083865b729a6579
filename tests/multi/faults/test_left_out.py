"""A node that cannot take its part is left out by its name, and the others go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.multi.faults.test_serving_recovery import SIZES, Streams, Truth, model, play, truth
from tests.support.cluster.full_disk import no_room
from tllm.cluster.certificates import Authority
from tllm.core.errors import ClusterError
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.recovery.left_out import AGAIN_SECONDS
from tllm.node.roles.serving_rank import ServingRank
from tllm.node.serve.open_cluster import open_cluster
from tllm.node.serve.serving import Serving
from tllm.node.sources.node_source import JoinLine
from tllm.node.worker import Worker, WorkerSettings
from tllm.spec.plan import Plan

__all__ = ["model", "truth"]  # fixtures

pytestmark = pytest.mark.timeout(120)

SECONDS = 100.0


class Nodes:
    """Workers in threads of this process, by their names; they end with their cluster."""

    def __init__(self, names: str) -> None:
        self.workers: dict[str, Worker] = {}
        self._names = names
        self._threads: list[threading.Thread] = []

    def invite(self, address: str, token: str) -> None:
        if not self._threads:
            for name in self._names:
                thread = threading.Thread(target=self._work, args=(address, token, name), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _work(self, address: str, token: str, name: str) -> None:
        host, _, port = address.rpartition(":")
        self.workers[name] = Worker(WorkerSettings(host=host, port=int(port), token=token, node=name, threads=1))
        self.workers[name].run()

    @property
    def options(self) -> ClusterOptions:
        return ClusterOptions(local=0, source=JoinLine(self.invite), join_seconds=60)

    def end(self) -> None:
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes("abc")
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
    model: Path, truth: Truth, nodes: Nodes, caplog: pytest.LogCaptureFixture
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
    model: Path, truth: Truth, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, poor = ServingRank.__init__, set[str]()

    def make(self: ServingRank, assign: object, identity: object, *rest: object) -> None:
        if identity.name in poor:  # type: ignore[attr-defined]
            raise OSError(24, "Too many open files")
        made(self, assign, identity, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ServingRank, "__init__", make)

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


def test_an_epoch_begins_while_no_disk_takes_a_byte(model: Path, truth: Truth, nodes: Nodes, tmp_path: Path) -> None:
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
