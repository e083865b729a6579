"""What a run that samples completions tells and leaves, and that two of them are one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from torch import Tensor

from tests.support.training.runs import final, records, train
from tests.support.training.training_step import furthest
from tllm.training.job.job import Job
from tllm.training.policy.completions_file import COMPLETIONS
from tllm.training.report.metrics import StepRecord

Told = tuple[list[StepRecord], dict[str, Tensor], str]
"""Records of the steps, the finished weights, and the file of completions."""


def told(job: Job, plan: str) -> Told:
    run = Path(job.output_dir)
    return records(train(job, plan)), final(run), (run / COMPLETIONS).read_text()


def check_same_run(got: Told, want: Told) -> None:
    """The same completions; losses, metrics and weights but for roundings of float64."""
    assert got[2] == want[2], "the same completions"
    check_same_steps(got[0], want[0])
    off, where = furthest(got[1], want[1])
    assert off < 1e-11, where


def check_same_steps(got: Sequence[StepRecord], want: Sequence[StepRecord], but: Collection[str] = ()) -> None:
    """Losses, and the metrics that `want` has but for these."""
    for one, other in zip(got, want, strict=True):
        assert abs(one.loss - other.loss) < 1e-12 and one.metrics is not None and other.metrics is not None
        assert max(abs(one.metrics[name] - other.metrics[name]) for name in other.metrics.keys() - set(but)) < 1e-12
