"""A machine that has no part yet, as one that has just come back, can know the coordinator's state already."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.multi.faults.test_serving_recovery import SIZES, model, play
from tests.support.faults.thread_nodes import ThreadNodes
from tllm.cluster.certificates import Identity
from tllm.node.replication.replica_host import JoinedReplica
from tllm.node.serve.open_cluster import open_cluster

__all__ = ["model"]  # a fixture

pytestmark = pytest.mark.timeout(120)


def make_replica(identity: Identity, host: str) -> JoinedReplica:
    return JoinedReplica(identity, host, {})


def test_nodes_without_a_part_hold_replicas(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = ThreadNodes("abc", monkeypatch, make_replica)

    async def scene() -> None:
        async with open_cluster(model, "pp=1", SIZES, replace(nodes.options, replicas=3, spare_nodes=2)) as cluster:
            while len(cluster.status()["replicas"]["nodes"]) < 3:
                await asyncio.sleep(0.02)
            assert len(cluster.state.ranks) == 1, "so at least one of the two has none"

    play(scene, 100)
    nodes.end()


def test_a_node_without_the_models_files_is_named_and_holds_none(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There are none where it looks for them, as on a machine that fetches its part from others."""
    nodes, folder = ThreadNodes("abc", monkeypatch, make_replica), Path(shutil.copytree(model, tmp_path / "model"))

    async def scene() -> None:
        async with open_cluster(folder, "pp=1", SIZES, replace(nodes.options, replicas=3, spare_nodes=2)) as cluster:
            while "does not hold a replica of the coordinator's state" not in caplog.text:
                await asyncio.sleep(0.02)
            eligible = cluster.status()["replicas"]["eligible"]
            assert len(eligible) < 3 and len(cluster.status()["replicas"]["nodes"]) < 3

    monkeypatch.setattr("tllm.node.replication.replica_host.same_model", lambda folder, files: None)
    play(scene, 100)
    nodes.end()
