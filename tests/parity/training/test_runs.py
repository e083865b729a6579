"""Whole runs: the golden one against a plain loop over `transformers`, every plan against the golden one."""

from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.models.families import save_model
from tests.support.selection import soak_but
from tests.support.training.runs import final, plain_loop, records, rows_file, short_job, train
from tests.support.training.training_step import furthest, saved
from tllm.core.errors import CapacityError, ConfigError
from tllm.core.memory import amount
from tllm.training.checkpoint.durable_disk import DurableDisk
from tllm.training.report.events import RunBegan, RunEnded, RunSaved

GRIDS = ("tp=8,tensor=3d", "tp=8,tensor=2.5d", "dp=2,tp=4,tensor=2d,zero=2,recompute=layer")
PLANS = (
    "dp=2",
    "dp=3:1",
    "dp=5",
    "pp=2",
    "pp=4,schedule=gpipe",
    "pp=2,schedule=zero_bubble,depth=2",
    "pp=2,chunks=2",
    "tp=2",
    "tp=3,shares=1:2:1",
    "tp=2,sequence=true",
    "cp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "dp=2,pp=2,zero=3,recompute=layer",
    "pp=2,recompute=selective",
    "dp=2,zero=1,offload=disk",
    "pp=2,tp=1+2,layers=1+3",
    "dp=2,pp=2,tp=2,zero=1",
    "dp=2,pp=2,tp=2,zero=2,sequence=true,schedule=zero_bubble",
    "dp=2,pp=2,cp=2",
    "dp=2,servers=1",
    "dp=3:1:1,servers=2",
    *GRIDS,
)
SHORT = [plan for plan in PLANS[1::2] if plan not in (*GRIDS, "pp=2", "tp=2", "dp=2,zero=1")]
"""Of each key one; what is left out is in longer ones."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


def losses(news: list) -> list[float]:  # type: ignore[type-arg]
    return [record.loss for record in records(news)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "steps"),
    [
        ("llama", 12),
        ("qwen3_moe", 5),
        *soak_but([], [("llama", 30), ("qwen3_moe", 30), ("llama_mha_tied_bias", 30), ("gemma2", 30)]),
    ],
)
def test_the_golden_run_is_the_plain_loop(case: str, steps: int, tmp_path: Path) -> None:
    truth = save_model(case, tmp_path / "model")
    job = short_job(tmp_path / "model", tmp_path / "run", max_steps=steps)
    got = losses(train(job, "pp=1"))
    want = plain_loop(job, truth)
    assert len(got) == steps and (got[-1] < got[0] or steps < 30)
    assert max(abs(a - b) / b for a, b in zip(got, want, strict=True)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("plan", soak_but(GRIDS[::2], GRIDS))
def test_every_grid_is_the_golden_run(plan: str, model: Path, tmp_path: Path) -> None:
    """Two steps: each passes hundreds of messages between the ranks of a grid."""
    more = dict(dtype="float64", max_steps=2, save_steps=2)
    want = losses(train(short_job(model, tmp_path / "golden", **more), "pp=1"))
    got = losses(train(short_job(model, tmp_path / "run", **more), plan))
    assert max(abs(a - b) / b for a, b in zip(got, want, strict=True)) < 1e-12
    off, name = furthest(final(tmp_path / "run"), final(tmp_path / "golden"))
    assert off < 1e-11, name


@pytest.mark.slow
@pytest.mark.parametrize("plan", soak_but(SHORT, PLANS))
def test_every_plan_is_the_golden_run(plan: str, model: Path, golden: tuple[list[float], Path], tmp_path: Path) -> None:
    want, folder = golden
    got = losses(train(short_job(model, tmp_path / "run", dtype="float64"), plan))
    assert max(abs(a - b) / b for a, b in zip(got, want, strict=True)) < 1e-12
    off, name = furthest(final(tmp_path / "run"), final(folder))
    assert off < 1e-11, name


@pytest.fixture(scope="module")
def golden(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Losses and folder of the run on one rank, in float64."""
    run = tmp_path_factory.mktemp("golden") / "run"
    return losses(train(short_job(model, run, dtype="float64"), "pp=1")), run


CHANGES = [
    ("dp=2,pp=2,zero=1", "tp=2"),
    ("dp=2,zero=2", "dp=3,servers=1"),
    ("tp=4,tensor=2d", "tp=2"),
    ("pp=1", "dp=2,zero=2"),
    ("pp=2", "tp=8,tensor=3d"),
    ("tp=3", "pp=4"),
    ("cp=2", "dp=3,zero=1"),
    ("dp=2,servers=2", "tp=2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    soak_but(CHANGES[:3], CHANGES),
)
def test_a_run_that_is_stopped_goes_on_under_another_plan(
    before: str, after: str, model: Path, golden: tuple[list[float], Path], tmp_path: Path
) -> None:
    want, folder = golden
    job = short_job(model, tmp_path / "run", dtype="float64")
    steps = itertools.count(1)
    first = train(job, before, lambda: next(steps) >= 2)
    assert 1 <= len(losses(first)) < 4 and isinstance(first[-1], RunEnded) and first[-1].final == ""
    assert isinstance(first[-2], RunSaved) and first[-2].step == first[-1].step
    second = train(job, after)
    assert [record.step for record in records([*first, *second])] == [1, 2, 3, 4]
    got = losses([*first, *second])
    assert max(abs(a - b) / b for a, b in zip(got, want, strict=True)) < 1e-12
    off, name = furthest(final(tmp_path / "run"), final(folder))
    assert off < 1e-11, name


def test_nodes_need_not_share_a_disk(model: Path, tmp_path: Path) -> None:
    """Three nodes, then two others, one of them new: what a node lacks comes from those that have it."""
    nodes = [tmp_path / f"node{i}" for i in range(4)]
    job = short_job(model, nodes[0], max_steps=2, dtype="float64")
    train(job, "pp=3,layers=1+1+2", folders=nodes[:3])
    assert {path.name for path in nodes[1].iterdir()} == {"step-2"}
    longer = short_job(model, nodes[0], max_steps=4, dtype="float64", lr_scheduler_type="constant")
    news = train(longer, "tp=4", folders=[nodes[0], nodes[3], nodes[1], nodes[2]])
    assert [record.step for record in records(news)] == [3, 4]
    assert set(final(nodes[0])) == set(saved(model))


def test_random_weights_do_not_hang_on_the_layout(model: Path, tmp_path: Path) -> None:
    made = []
    for plan in ("pp=1", "dp=2,pp=2,tp=2"):
        job = short_job(
            model, tmp_path / plan, model_name_or_path=None, config_name=str(model), learning_rate=0.0, max_steps=1
        )
        train(job, plan)
        made.append(final(tmp_path / plan))
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    weights = made[0]["model.layers.0.mlp.up_proj.weight"]
    assert 0.015 < float(weights.std()) < 0.025
    assert torch.equal(made[0]["model.norm.weight"], torch.ones(48))


def test_a_finished_run_has_nothing_left_to_do(model: Path, tmp_path: Path) -> None:
    job = short_job(model, tmp_path / "run", max_steps=2, dtype="bfloat16")
    train(job, "pp=1")
    again = train(job, "dp=2")
    assert records(again) == [] and isinstance(again[-1], RunEnded) and again[-1].step == 2
    assert json.loads((tmp_path / "run" / "final" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in final(tmp_path / "run").values()} == {torch.bfloat16}


def test_a_row_that_cannot_be_read_costs_no_step_before_it(model: Path, tmp_path: Path) -> None:
    """Every rank is told the row, and none that another one went away."""
    rows = rows_file(tmp_path / "bad.jsonl")
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join([*lines[:9], '{"input_ids": [1, 2\n', *lines[10:]]))
    with pytest.raises(ConfigError, match="line 10: Input data was truncated"):
        train(short_job(model, tmp_path / "run", train_files=(str(rows),), save_steps=100), "dp=2")
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-2"]


def test_a_run_whose_last_step_is_not_saved_has_no_finished_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a save before would be taken for it. The same run then takes the steps that are left."""
    write = DurableDisk.write

    def full(disk: DurableDisk, path: Path, content: Iterable[bytes | memoryview]) -> int:
        if "step-4" in path.parent.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(disk, path, content)

    job = short_job(model, tmp_path / "run", save_steps=2)
    with monkeypatch.context() as patched:
        patched.setattr(DurableDisk, "write", full)
        with pytest.raises(CapacityError, match="all 4 steps were taken, and the last could not be saved"):
            train(job, "dp=2")
    assert not (tmp_path / "run" / "final").exists()
    assert [record.step for record in records(train(job, "dp=2"))] == [3, 4]
    assert (tmp_path / "run" / "final").is_dir()


@pytest.mark.parametrize("plan", ["pp=1", "dp=2,pp=2,zero=1", "dp=2,servers=1"])
def test_a_run_says_as_it_begins_that_its_saves_have_no_room(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    """With the bytes that its saves turn out to have, whichever ranks write them."""
    monkeypatch.setattr(DurableDisk, "free", lambda disk, folder: 1000)
    run = tmp_path / "run"
    told = next(event for event in train(short_job(model, run, max_steps=2, save_steps=2), plan))
    assert isinstance(told, RunBegan)
    tensors = [tensor for file in (run / "step-2").glob("*.safetensors") for tensor in load_file(file).values()]
    takes = amount(sum(tensor.nbytes for tensor in tensors))
    assert f"has 1000 B free and a save takes {takes} there: saves will fail" in told.disk
    monkeypatch.undo()
    again = next(event for event in train(short_job(model, run, max_steps=3, save_steps=2), plan))
    assert isinstance(again, RunBegan) and not again.disk


def test_rows_of_which_nothing_is_predicted(model: Path, tmp_path: Path) -> None:
    """Steps of them alone move nothing, replicas that learn on their own included; held out they have no loss."""
    rows = tmp_path / "masked.jsonl"
    rows.write_text('{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}\n' * 8)
    job = short_job(model, tmp_path / "run", train_files=(str(rows),), local_steps=2, weight_decay=0.0, max_steps=2)
    assert [record.loss for record in records(train(job, "dp=2"))] == [0.0, 0.0]
    assert furthest(final(tmp_path / "run"), saved(model))[0] == 0
    with pytest.raises(ConfigError, match="nothing of the rows in eval_files is predicted"):
        train(short_job(model, tmp_path / "held out", eval_files=(str(rows),)), "pp=1")


def test_files_are_read_on_one_rank_alone(model: Path, tmp_path: Path) -> None:
    job = short_job(model, tmp_path / "run", train_files=(str(rows_file(tmp_path / "other.jsonl", 40)),), max_steps=1)
    opened = []
    train(job, "dp=2,pp=2", damage=lambda trainer: opened.append(trainer._feed._batches is not None))
    assert sorted(opened) == [False, False, False, True]


def test_a_run_that_has_taken_more_steps_than_its_job_has_says_so(tmp_path: Path) -> None:
    """It has nothing to do and no model to finish; it ended as if it had been stopped."""
    save_model("llama", tmp_path / "model")
    job = short_job(tmp_path / "model", tmp_path / "run", save_steps=2)
    train(job, "pp=1")
    with pytest.raises(ConfigError, match=r"max_steps is 2 and the run in .* has taken 4 steps"):
        train(replace(job, max_steps=2), "pp=1")
    train(job, "pp=1")
