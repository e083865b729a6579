"""A server that goes over to another plan gives its streams the tokens that they would have had."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multi.faults.test_serving_recovery import SIZES, Streams, Truth, begun, model, play, truth
from tllm.core.errors import CapacityError, PlanError
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.serve.open_cluster import open_cluster
from tllm.spec.plan import Plan

__all__ = ["model", "truth"]  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each starts several processes that load torch


def test_streams_go_on_through_moves_and_from_a_plan_that_cannot_begin(
    model: Path, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with open_cluster(model, "pp=2", SIZES, ClusterOptions(threads=1)) as cluster:
            streams = Streams(cluster)
            for epoch, (text, nodes) in enumerate(
                [("pp=1", ["local-1"]), ("tp=2", ["local-1", "local-0"]), ("pp=2,layers=3+1", ["local-0", "local-1"])]
            ):
                await streams.reach(20 * (epoch + 1))
                plan = Plan.parse(text, 4)
                cluster.move(plan, nodes)
                await begun(cluster, epoch + 2)
                assert cluster.state.plan == plan and [member.node for member in cluster.state.ranks] == nodes
            await streams.reach(100)
            monkeypatch.setattr(cluster, "check", refuse_one_stage(cluster))
            cluster.move(Plan.parse("pp=1", 4), ["local-0"])
            await begun(cluster, 6)
            assert str(cluster.state.plan) == "pp=2,tp=1+1,layers=3+1"
            assert await streams.end() == truth
            assert cluster.stats()["losses"] == 0
            with pytest.raises(PlanError):
                cluster.move(Plan.parse("dp=2", 4), ["local-0", "local-1"])

    play(scene)


def refuse_one_stage(cluster: object) -> object:
    def check(prepared: dict[int, object]) -> None:
        if len(prepared) == 1:
            raise CapacityError("rank 0 needs 9 bytes and there are 8")

    return check
