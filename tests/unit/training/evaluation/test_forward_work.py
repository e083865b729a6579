"""What is said of an evaluation that cannot be made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.models.families import save_model
from tests.support.training.runs import job_for, train
from tllm.training.data.batches import Batches
from tllm.training.evaluation.forward_work import ForwardWork
from tllm.training.evaluation.held_out import Evaluated
from tllm.training.questions.stop_signal import STOPPED
from tllm.training.report.events import RunEnded
from tllm.training.trainer import RankTrainer


class Unanswered:
    """A part of an evaluation that nobody answers."""

    def __init__(self, fault: tuple[str, str]) -> None:
        self.fault = fault

    def prepare(self, batches: Batches | None) -> None: ...

    def evaluate(self, step: int) -> Evaluated:
        return Evaluated(fault=self.fault)


def test_rank_0_says_that_a_stopped_evaluation_is_not_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_for(tmp_path, tmp_path / "run", eval_files=("held_out.jsonl",), eval_steps=2)
    model: Any = SimpleNamespace(objective=SimpleNamespace(metric_names=()))
    for rank, fault in ((1, STOPPED), (0, ("there is no memory", "")), (0, STOPPED)):
        config: Any = SimpleNamespace(job=job, rank=rank)
        work = ForwardWork(config, model, None, None, [Unanswered(fault)])
        assert work.evaluate(3) is None
        assert work.evaluate(4) == Evaluated(fault=fault)
    assert caplog.messages == ["the evaluation after step 4 was stopped and is not made again"]


def test_a_run_whose_last_evaluation_was_stopped_is_left_and_not_done(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    rows = str(tmp_path / "rows.jsonl")
    job = job_for(tmp_path / "model", tmp_path / "run", max_steps=2, eval_steps=2, eval_files=(rows,))

    def damage(trainer: RankTrainer) -> None:
        trainer._forward._others = [Unanswered(STOPPED)]

    assert train(job, "pp=1", damage=damage)[-1] == RunEnded(2)
    last = train(job, "pp=1")[-1]
    assert isinstance(last, RunEnded) and last.final, "the same command goes on"
