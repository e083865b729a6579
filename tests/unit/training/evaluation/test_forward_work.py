"""What is said of an evaluation that cannot be made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.training.runs import job_for
from tllm.training.data.batches import Batches
from tllm.training.evaluation.forward_work import ForwardWork
from tllm.training.evaluation.held_out import Evaluated
from tllm.training.questions.stop_signal import STOPPED


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
