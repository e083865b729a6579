"""`load_best_model_at_end`: the best save is spared and finished with, under every plan, after resumes and losses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.parity.training.fine_tuning.test_early_stopping import Ended, end_of, stopping_job
from tests.support.models.families import save_model
from tests.support.selection import soak_but
from tests.support.training.runs import final, records, train
from tests.support.training.snapshot_epochs import Epochs
from tests.support.training.training_step import furthest
from tllm.core.errors import ConfigError
from tllm.spec.plan import Plan
from tllm.training.job.combinations import check_combination
from tllm.training.job.initial_model import open_initial_model
from tllm.training.job.job import Job
from tllm.training.job.lora_job import LoraJob
from tllm.training.report.events import RunBegan, RunEvent
from tllm.training.report.metrics import FILE, read_records
from tllm.training.trainer import RankTrainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama_mha_tied_bias", folder)
    return folder


def best_job(model: Path, run: Path, **more: Any) -> Job:
    """Each evaluation is of a save. The rate does not fall, so that a shorter run's steps are this one's."""
    keys = dict(load_best_model_at_end=True, save_steps=2, lr_scheduler_type="constant", early_stopping_patience=3)
    return stopping_job(model, run, **{**keys, **more})


def best_step(news: Sequence[RunEvent]) -> int:
    losses = {one.step: one.eval_loss for one in records(news) if one.eval_loss is not None}
    return min(losses, key=lambda step: losses[step] or 0.0)


def saves(*runs: Path) -> list[str]:
    """The complete saves that are left, by any node."""
    return sorted({path.name for run in runs for path in run.glob("step-*")})


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    run = tmp_path_factory.mktemp("alone") / "run"
    return train(best_job(model, run), "pp=1"), final(run)


def test_the_finished_model_is_that_of_a_run_that_ended_at_the_best_evaluation(
    alone: Ended, model: Path, tmp_path: Path
) -> None:
    news, tensors = alone
    best, ended = best_step(news), end_of(news)
    assert ended.step == best + 3 * 2 and ended.model_step == best, "three saves came after it, of which two stay"
    assert "loss" in ended.choice and "the best of the saves" in ended.of_step
    train(best_job(model, tmp_path / "run", max_steps=best, load_best_model_at_end=False), "pp=1")
    off, where = furthest(final(tmp_path / "run"), tensors)
    assert off == 0, where


def test_metrics_say_why_the_run_ended_early(alone: Ended, model: Path, tmp_path: Path) -> None:
    told = [one.early_stopping for one in records(alone[0])]
    assert told[:-1] == [None] * (len(told) - 1) and told[-1] == end_of(alone[0]).reason != ""
    run = tmp_path / "run"
    train(best_job(model, run, early_stopping_patience=1, dtype="float32", max_steps=12), "dp=2")
    assert [one.early_stopping is None for one in read_records(run / "metrics.jsonl")][-1] is False
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["early_stopping"].startswith("1 evaluation without a gain: loss was at its best")


@pytest.mark.parametrize("plan", soak_but([], ["dp=2,zero=1", "pp=2", "tp=2"]))
def test_every_plan_leaves_the_files_of_one_process(plan: str, alone: Ended, model: Path, tmp_path: Path) -> None:
    news, run = train(best_job(model, tmp_path / "run"), plan), tmp_path / "run"
    want = end_of(alone[0])
    assert (end_of(news).step, end_of(news).model_step) == (want.step, want.model_step)
    assert saves(run) == sorted([f"step-{want.model_step}", f"step-{want.step}"])
    assert furthest(final(run), alone[1])[0] < 1e-9


@pytest.mark.slow
def test_the_best_save_is_spared_and_known_after_a_resume_under_another_plan(
    alone: Ended, model: Path, tmp_path: Path
) -> None:
    want, job, run = end_of(alone[0]), best_job(model, tmp_path / "run"), tmp_path / "run"
    steps = itertools.count(1)
    broken = end_of(train(job, "pp=1", lambda: next(steps) >= want.model_step + 3))
    assert (broken.step, broken.final, broken.model_step) == (want.model_step + 3, "", 0)
    assert f"step-{want.model_step}" in saves(run)
    again = end_of(train(job, "tp=2"))
    assert (again.step, again.model_step) == (want.step, want.model_step)
    assert furthest(final(run), alone[1])[0] < 1e-9
    without = end_of(train(replace(job, load_best_model_at_end=False), "pp=1"))
    assert (without.model_step, without.of_step) == (want.step, ""), "the same saves, and the last of them"
    assert furthest(final(run), alone[1])[0] > 1e-3
    worst = end_of(train(replace(job, greater_is_better=True), "dp=2"))
    losses = {record.step: record.eval_loss for record in read_records(run / FILE) if record.eval_loss is not None}
    assert worst.step > want.step, "nobody has waited for a gain of this kind"
    later = {step: loss for step, loss in losses.items() if step >= want.step}
    assert worst.model_step == max(later, key=later.__getitem__), "saves are compared by what the job asks for now"


def lost(model: Path, run: Path, want: int, successor: str) -> tuple[list[RunEvent], list[str]]:
    """Two nodes with disks of their own save; b dies three steps after the best save, and `successor` goes on."""
    epochs = Epochs(best_job(model, run))

    def die_late(trainer: RankTrainer, die: Callable[[], None]) -> None:
        begin = trainer._feed.next
        trainer._feed.next = lambda wait: die() if trainer._step == want + 3 else begin(wait)  # type: ignore

    epochs.run("dp=2", "ab", {"b": die_late})
    news = epochs.run("dp=2", f"a{successor}")
    assert isinstance(news[0], RunBegan) and news[0].origin == "memory" and news[0].step > want
    return news, saves(run, Path(f"{run}-{successor}"))


@pytest.mark.slow
def test_a_lost_rank_that_comes_back_has_its_part_of_the_best_save(alone: Ended, model: Path, tmp_path: Path) -> None:
    want = end_of(alone[0])
    news, left = lost(model, tmp_path / "run", want.model_step, "b")
    assert (end_of(news).step, end_of(news).model_step) == (want.step, want.model_step)
    assert left == sorted([f"step-{want.model_step}", f"step-{want.step}"])
    assert furthest(final(tmp_path / "run"), alone[1])[0] < 1e-9


@pytest.mark.slow
def test_a_best_save_that_went_with_a_node_is_told_and_the_best_of_the_others_is_taken(
    alone: Ended, model: Path, tmp_path: Path
) -> None:
    want = end_of(alone[0])
    ended = end_of(lost(model, tmp_path / "run", want.model_step, "c")[0])
    losses = {one.step: one.eval_loss or 0.0 for one in records(alone[0]) if one.eval_loss is not None}
    later = [step for step in losses if step > want.model_step + 2]
    assert ended.model_step == min(later, key=losses.__getitem__), "saves before the loss are not whole"
    assert f"after step {want.model_step} has no save" in ended.choice


@pytest.mark.slow
def test_the_best_adapter_is_finished_with(model: Path, tmp_path: Path) -> None:
    """An adapter that learns slowly has its greatest loss first."""
    keys: dict[str, Any] = dict(lora=LoraJob(r=4, lora_alpha=8.0), learning_rate=1e-2, greater_is_better=True)
    found = []
    for number, plan in enumerate(("pp=1", "dp=2")):
        run = tmp_path / str(number) / "run"
        run.parent.mkdir()
        news = train(best_job(model, run, **keys), plan)
        ended, adapter = end_of(news), load_file(run / "final" / "adapter_model.safetensors")
        assert ended.model_step == 2 < ended.step == 8
        found.append(adapter)
    assert furthest(found[1], found[0])[0] < 1e-9
    short = tmp_path / "short" / "run"
    short.parent.mkdir()
    train(best_job(model, short, max_steps=2, load_best_model_at_end=False, **keys), "pp=1")
    assert furthest(load_file(short / "final" / "adapter_model.safetensors"), found[0])[0] == 0


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"eval_files": (), "early_stopping_patience": 0}, "load_best_model_at_end is true and eval_files is empty"),
        ({"save_steps": 5}, "save_steps is 5 and eval_steps is 2"),
        ({"save_steps": 2, "eval_steps": 4}, "save_steps is 2 and eval_steps is 4"),
        ({"delay_steps": 1}, "delay_steps is 1: a save has the update that was on its way"),
    ],
)
def test_what_leaves_a_save_without_its_evaluation_is_refused(
    keys: dict[str, Any], says: str, model: Path, tmp_path: Path
) -> None:
    job = best_job(model, tmp_path / "run", **keys)
    spec = open_initial_model(job).spec
    with pytest.raises(ConfigError, match=says):
        check_combination(job, Plan.parse("pp=1", spec.num_layers), spec)
