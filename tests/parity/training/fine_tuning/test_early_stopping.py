"""Runs that evaluations end: at the same step and with the same weights under every plan, and across a resume."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.families import save_model
from tests.support.selection import soak_but
from tests.support.training.runs import final, job_for, records, rows_file, train
from tests.support.training.snapshot_epochs import Epochs
from tests.support.training.training_step import furthest
from tllm.core.errors import ConfigError
from tllm.spec.plan import Plan
from tllm.training.job.combinations import check_combination
from tllm.training.job.initial_model import open_initial_model
from tllm.training.job.job import Job
from tllm.training.report.events import RunBegan, RunEnded, RunEvent
from tllm.training.trainer import RankTrainer

Ended = tuple[list[RunEvent], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama_mha_tied_bias", folder)
    return folder


def stopping_job(model: Path, run: Path, **more: Any) -> Job:
    """Random rows teach nothing of other random rows: the loss of those held out soon rises."""
    run.parent.mkdir(exist_ok=True)
    held_out = rows_file(run.parent / "held_out.jsonl", count=8, seed=9)
    keys = dict(
        eval_files=(str(held_out),),
        eval_steps=2,
        early_stopping_patience=2,
        max_steps=24,
        learning_rate=3e-2,
        save_steps=5,
        dtype="float64",
    )
    return job_for(model, run, **{**keys, **more})


def end_of(news: list[RunEvent]) -> RunEnded:
    ended = news[-1]
    assert isinstance(ended, RunEnded)
    return ended


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    run = tmp_path_factory.mktemp("alone") / "run"
    return train(stopping_job(model, run), "pp=1"), final(run)


def test_a_run_ends_after_as_many_evaluations_without_a_gain_as_it_has_patience(alone: Ended) -> None:
    news, _ = alone
    losses = {one.step: one.eval_loss for one in records(news) if one.eval_loss is not None}
    best = min(losses, key=lambda step: losses[step] or 0.0)
    ended = end_of(news)
    assert ended.step == best + 2 * 2 < 24
    assert f"after step {best}" in ended.reason and ended.final


def test_perplexity_is_the_exponential_of_the_loss_held_out(alone: Ended) -> None:
    told = [(one.eval_loss, one.eval_perplexity) for one in records(alone[0])]
    assert all((loss is None) == (perplexity is None) for loss, perplexity in told)
    assert all(math.exp(loss) == perplexity for loss, perplexity in told if loss is not None)


def test_seconds_of_an_evaluation_stand_beside_its_loss(alone: Ended) -> None:
    for one in records(alone[0]):
        assert (one.eval_loss is None) == (one.eval_seconds is None)
        assert one.eval_seconds is None or one.eval_seconds > 0


@pytest.mark.parametrize("plan", soak_but(["dp=2"], ["dp=2", "pp=2", "tp=2"]))
def test_every_plan_ends_at_the_same_step_with_the_same_weights(
    plan: str, alone: Ended, model: Path, tmp_path: Path
) -> None:
    news = train(stopping_job(model, tmp_path / "run"), plan)
    assert end_of(news).step == end_of(alone[0]).step
    assert furthest(final(tmp_path / "run"), alone[1])[0] < 1e-9


def test_patience_goes_on_after_a_resume_under_another_plan(alone: Ended, model: Path, tmp_path: Path) -> None:
    want, job = end_of(alone[0]), stopping_job(model, tmp_path / "run")
    steps = itertools.count(1)
    broken = train(job, "pp=1", lambda: next(steps) >= want.step - 1)
    assert end_of(broken).step == want.step - 1 and not end_of(broken).final and not end_of(broken).reason
    again = end_of(train(job, "dp=2"))
    assert (again.step, again.reason) == (want.step, want.reason)
    assert furthest(final(tmp_path / "run"), alone[1])[0] < 1e-9
    assert records(train(job, "pp=2")) == []  # it has ended, and takes no step more
    patient = train(replace(job, early_stopping_patience=3), "pp=2")
    assert [one.step for one in records(patient)] == [want.step + 1, want.step + 2]


def test_patience_goes_on_from_memory_after_a_lost_rank(alone: Ended, model: Path, tmp_path: Path) -> None:
    want = end_of(alone[0])
    run = Epochs(stopping_job(model, tmp_path / "run", save_steps=100))

    def die_late(trainer: RankTrainer, die: Callable[[], None]) -> None:
        begin = trainer._feed.next
        trainer._feed.next = lambda wait: die() if trainer._step == want.step - 1 else begin(wait)  # type: ignore

    run.run("dp=2", "ab", {"b": die_late})
    again = run.run("pp=2", "ac")
    assert isinstance(again[0], RunBegan) and again[0].origin == "memory"
    assert again[0].step > want.step - 4  # the best evaluation was before
    assert (end_of(again).step, end_of(again).reason) == (want.step, want.reason)


def test_a_metric_that_the_task_does_not_tell_is_refused(model: Path, tmp_path: Path) -> None:
    job = stopping_job(model, tmp_path / "run", metric_for_best_model="rewards/margins")
    with pytest.raises(ConfigError, match="'rewards/margins', which the task 'sft' does not tell"):
        train(job, "pp=1")


def test_perplexity_is_compared_as_its_loss_is(alone: Ended, model: Path, tmp_path: Path) -> None:
    news = train(stopping_job(model, tmp_path / "run", metric_for_best_model="eval_perplexity"), "pp=1")
    assert end_of(news).step == end_of(alone[0]).step and "perplexity was at its best" in end_of(news).reason
    assert furthest(final(tmp_path / "run"), alone[1])[0] < 1e-9


def test_patience_without_rows_held_out_is_refused(model: Path, tmp_path: Path) -> None:
    job = stopping_job(model, tmp_path / "run", eval_files=())
    spec = open_initial_model(job).spec
    with pytest.raises(ConfigError, match="early_stopping_patience is 2 and eval_files is empty"):
        check_combination(job, Plan.parse("pp=1", spec.num_layers), spec)
