"""Whole runs with servers whose replicas do not wait for each other; `test_runs` has the synchronous ones."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from tests.support.models.families import save_model
from tests.support.training.runs import final, job_for, records, train
from tests.support.training.training_step import furthest
from tllm.model.transformer import Transformer
from tllm.training import trainer as trainer_module
from tllm.training.checkpoint.checkpoint import open_folder
from tllm.training.job.job import Job
from tllm.training.report.events import RunEnded
from tllm.training.step import rank_model as model_module
from tllm.training.step.model_chunks import parameters_of
from tllm.training.step.pipeline_step import StepResult
from tllm.training.trainer import RankTrainer

PATIENCE = 20.0
"""Seconds that a thread waits for another at most, in a test that fails."""


def rows_of(job: Job, step: int) -> list[list[int]]:
    """The rows of a step, counted from 1, of which each of two replicas takes half."""
    rows = [json.loads(line)["input_ids"] for line in Path(job.train_files[0]).read_text().splitlines()]
    size = job.global_batch_size
    return rows[(step - 1) * size : step * size]


def mean_loss(model: transformers.PreTrainedModel, rows: list[list[int]]) -> float:
    with torch.no_grad():
        losses = [F.cross_entropy(model(torch.tensor([row])).logits[0, :-1], torch.tensor(row[1:])) for row in rows]
    predicted = [len(row) - 1 for row in rows]
    return sum(loss.item() * count for loss, count in zip(losses, predicted, strict=True)) / sum(predicted)


def test_replicas_that_do_not_wait_meet_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped and gone on with. Weights stay as they are, so that every record can be told from the rows alone."""
    monkeypatch.setattr(trainer_module, "MEET_STEPS", 3)
    truth = save_model("llama", tmp_path / "model")
    job = job_for(tmp_path / "model", tmp_path / "run", max_steps=8, save_steps=5, learning_rate=0.0, max_staleness=-1)
    steps = itertools.count()
    first = train(job, "dp=2,servers=2", lambda: next(steps) > 0)
    assert [record.step for record in records(first)] == [1, 2, 3], "a stop is heard where ranks meet"
    assert isinstance(first[-1], RunEnded) and first[-1].final == ""
    assert open_folder(tmp_path / "run" / "step-3").facts["updates"] == 6
    second = train(job, "dp=2,servers=1")
    assert isinstance(second[-1], RunEnded) and second[-1].final == str(tmp_path / "run" / "final")
    assert open_folder(tmp_path / "run" / "step-8").facts["updates"] == 16
    told = records([*first, *second])
    assert [record.step for record in told] == list(range(1, 9))
    for record in told:
        rows = rows_of(job, record.step)
        if record.step not in (3, 5, 6, 8):
            rows = rows[:4]
        assert record.tokens == sum(map(len, rows))
        assert abs(record.loss - mean_loss(truth, rows)) < 1e-5 * record.loss
    off, name = furthest(final(tmp_path / "run"), dict(truth.state_dict()))
    assert off == 0, name


def test_what_was_never_pulled_is_a_number_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step that goes bad would be blamed on memory that nobody computes with."""
    save_model("llama", tmp_path / "model")
    build = model_module.build_chunks

    def poisoned(*how: Any) -> list[Transformer]:
        chunks = build(*how)
        for parameter in parameters_of(chunks):
            parameter.data.fill_(torch.nan)
        return chunks

    def look(trainer: RankTrainer) -> None:
        assert all(bool(parameter.isfinite().all()) for parameter in parameters_of(trainer._model.chunks))
        looked.append(trainer.config.rank)

    monkeypatch.setattr(model_module, "build_chunks", poisoned)
    looked: list[int] = []
    for steps in (1, 2):
        options = dict(max_steps=steps, lr_scheduler_type="constant")
        train(job_for(tmp_path / "model", tmp_path / "run", **options), "dp=2,servers=1", damage=look)
    assert sorted(looked) == [0, 0, 1, 1]


def test_every_byte_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether replicas meet at each step or once, in all they send each other what they send."""
    save_model("llama_mha_tied_bias", tmp_path / "model")  # a tied table is sent whole, whatever the rows
    options = dict(max_steps=4, save_steps=4, max_staleness=-1)
    sums = []
    for meet in (1, 2, 4):
        monkeypatch.setattr(trainer_module, "MEET_STEPS", meet)
        told = records(train(job_for(tmp_path / "model", tmp_path / str(meet), **options), "dp=2,servers=1"))
        sums.append(sum(record.bytes_sent for record in told))
        assert (told[0].bytes_sent > 0.9 * told[3].bytes_sent) == (meet == 1)
    parameters = sum(x.numel() for x in final(tmp_path / "1").values())
    assert sums[2] > 4 * 2 * 2 * 4 * parameters, "steps, replicas, both ways, bytes"
    assert max(sums) - min(sums) < 0.02 * sums[0], "meetings are short messages"


def test_one_replica_that_waits_for_nobody_is_the_golden_run(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    train(job_for(tmp_path / "model", tmp_path / "golden", dtype="float64"), "pp=1")
    job = job_for(tmp_path / "model", tmp_path / "run", dtype="float64", max_staleness=-1)
    steps = itertools.count(1)
    train(job, "servers=2", lambda: next(steps) >= 3)
    train(job, "servers=1")
    off, name = furthest(final(tmp_path / "run"), final(tmp_path / "golden"))
    assert off < 1e-11, name


def test_the_one_that_reads_the_data_holds_up_nobody(tmp_path: Path) -> None:
    """Rank 0, its first step done, waits until the other has come to its seventh."""
    save_model("llama", tmp_path / "model")
    is_far = threading.Event()

    def damage(trainer: RankTrainer) -> None:
        play, calls = trainer._model.forward_backward, itertools.count(1)

        def slow(*step: Any) -> StepResult:
            number = next(calls)
            if trainer.config.rank == 0 and number == 2:
                assert is_far.wait(PATIENCE)
            if trainer.config.rank == 1 and number == 7:
                is_far.set()
            return play(*step)

        trainer._model.forward_backward = slow  # type: ignore[method-assign]

    job = job_for(tmp_path / "model", tmp_path / "run", max_steps=8, save_steps=8, max_staleness=-1)
    assert [record.step for record in records(train(job, "dp=2,servers=1", damage=damage))] == list(range(1, 9))
