"""A run that goes over to another plan between two steps is the same run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multi.faults.test_training_recovery import (
    SECONDS,
    Joining,
    Whole,
    check,
    lasting,
    long_job,
    model,
    stop_after,
    told,
    whole,
)
from tests.support.training.opened_run import play
from tests.support.training.stand_in_trainer import Fault
from tllm.cluster.settings import PredictedSeconds
from tllm.core.errors import PlanError
from tllm.node.sources.node_source import JoinLine
from tllm.spec.plan import Plan
from tllm.training.report.events import RunEnded, RunEvent, RunLostRank, RunResumed, RunStepped

__all__ = ["model", "whole"]  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each starts several processes that load torch


def test_a_run_moves_to_other_plans_and_other_ranks(model: Path, whole: Whole, tmp_path: Path) -> None:
    job = long_job(model, tmp_path / "run")

    async def scene() -> None:
        async with lasting(job, "dp=2,zero=1") as run:

            def move(text: str, nodes: list[str]) -> None:
                plan = Plan.parse(text, 4)
                run.move(plan, nodes, PredictedSeconds(str(plan), {"step": 7.0}) if text == "tp=2" else None)

            with pytest.raises(PlanError):
                move("ep=2,dp=2", ["local-0", "local-1"])
            moves = [
                ("pp=2,layers=3+1", ["local-1", "local-0"]),
                ("pp=1", ["local-0"]),
                ("tp=2", ["local-0", "local-1"]),
            ]
            news, epoch = list[RunEvent](), 0
            async for one in run.events():
                news.append(one)
                if isinstance(one, RunStepped) and one.record.step > 3 and moves and run.state.epoch > epoch:
                    epoch = run.state.epoch
                    move(*moves.pop(0))
                stop_after(run, news, 3)
            assert not told(news, RunLostRank)
            pipeline, alone, tensors = told(news, RunResumed)
            assert (pipeline.plan, pipeline.nodes) == ("pp=2,tp=1+1,layers=3+1", ("local-1", "local-0"))
            assert (alone.plan, alone.nodes) == ("pp=1,tp=1,layers=4", ("local-0",))
            assert (tensors.plan, tensors.nodes) == ("pp=1,tp=2,layers=4", ("local-0", "local-1"))
            assert {one.origin for one in told(news, RunResumed)} == {"memory"}
            assert all(one.again <= 1 for one in told(news, RunResumed))
            assert isinstance(news[-1], RunEnded)
            last = news.index(tensors)
            for at, one in enumerate(news):
                if isinstance(one, RunStepped):
                    assert one.record.predicted_seconds == ({"step": 7.0} if at > last else None)

    play(scene(), SECONDS)
    check(job, whole)


def test_a_run_goes_back_from_a_plan_that_a_rank_cannot_begin(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = long_job(model, tmp_path / "run")
    (tmp_path / "run").mkdir()
    joining = Joining(2, Fault("no room", "node-1"))

    async def scene() -> None:
        async with lasting(job, "dp=2", local=0, source=JoinLine(joining.invite), join_seconds=120) as run:
            nodes = [member.node for member in run.state.ranks]
            moved = False
            async for one in run.events():
                if isinstance(one, RunStepped) and not moved:
                    run.move(Plan.parse("pp=2", 4), nodes)
                    moved = True
                assert not isinstance(one, RunLostRank)
                if isinstance(one, RunResumed):
                    assert (one.plan, list(one.nodes)) == ("pp=1,tp=1,layers=4,dp=2", nodes)
                    assert str(run.coordinator.work.plan) == one.plan and run.state.epoch == 3
                    run.stop()
            assert moved

    play(scene(), SECONDS)
    joining.end()
    (said,) = [record.getMessage() for record in caplog.records if "goes back" in record.getMessage()]
    assert "plan pp=2,tp=1+1,layers=2+2 failed" in said and "a stage needs 9 bytes and there are 8" in said
