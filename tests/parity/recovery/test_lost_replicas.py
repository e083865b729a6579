"""A rank is lost where each replica has something of its own: what it has not sent yet, or weights of local steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.recovery import test_lost_ranks
from tests.parity.recovery.test_lost_ranks import (
    at,
    began,
    check,
    computing,
    model,
    saved_and_told,
    saving,
    sending,
    told,
    updating,
)
from tests.support.selection import soak_but
from tests.support.training.runs import final, records, short_job, train
from tests.support.training.snapshot_epochs import Epochs, Hurt
from tests.support.training.training_step import furthest
from tllm.planner.memory.training_memory import training_bytes
from tllm.spec.plan import Plan
from tllm.training.job.initial_model import open_initial_model
from tllm.training.job.job_parts import training_facts
from tllm.training.report.metrics import FILE, read_records
from tllm.training.trainer import RankTrainer

__all__ = ["model"]  # a fixture

MODES: dict[str, dict[str, Any]] = {
    "int8": {"gradient_compression": "int8"},
    "powersgd": {"gradient_compression": "powersgd", "powersgd_rank": 2},
    "late": {"delay_steps": 1},
    "late int8": {"delay_steps": 1, "gradient_compression": "int8"},
    "late powersgd": {"delay_steps": 1, "gradient_compression": "powersgd", "powersgd_rank": 2},
    "local": {"local_steps": 2},
    "local int8": {"local_steps": 2, "gradient_compression": "int8"},
    "local powersgd": {"local_steps": 2, "gradient_compression": "powersgd", "powersgd_rank": 2},
}


KEPT = [
    ("int8", "dp=2,zero=1", saving, 0),
    ("int8", "dp=2,pp=2,zero=1", sending, 2),
    ("powersgd", "dp=2", updating, 0),
    ("late", "dp=2", computing, 0),
    ("late int8", "dp=2", updating, 1),
]
MORE = [
    ("late", "dp=2", saving, 1),
    ("int8", "dp=2", computing, 1),
    ("powersgd", "dp=2,pp=2,zero=1", told, 3),
    ("powersgd", "dp=2", saving, 1),
    ("late", "dp=2,zero=1", sending, 1),
    ("late powersgd", "dp=2", sending, 0),
]
LOCAL = [
    ("local", "dp=2", saving, 0),
    ("local", "dp=2,pp=2", updating, 2),
    ("local int8", "dp=2", told, 0),
    ("local", "dp=2", computing, 1),
    ("local powersgd", "dp=2", told, 1),
]


@pytest.mark.parametrize(("mode", "plan", "moment", "lost"), soak_but(KEPT, [*KEPT, *MORE]))
def test_the_same_plan_goes_on_to_the_bit(
    mode: str, plan: str, moment: Hurt, lost: int, model: Path, tmp_path: Path
) -> None:
    check(model, tmp_path, plan, moment, lost, **MODES[mode])


@pytest.mark.parametrize(("mode", "plan", "moment", "lost"), soak_but(LOCAL[:2], LOCAL))
def test_local_steps_go_on_from_an_outer_step(
    mode: str, plan: str, moment: Hurt, lost: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two copies one is whole: that of the last outer step, or the one before while that is on its way."""
    monkeypatch.setattr(test_lost_ranks, "STEP", 5)
    check(model, tmp_path, plan, moment, lost, behind=3, **MODES[mode])


def copying_after_a_save(trainer: RankTrainer, die: Callable[[], None]) -> None:
    """With its weights moved, when a save and a copy of another step are on all ranks."""

    def wait_and_die() -> None:
        trainer._state._saves._wait()
        die()

    at(trainer._state._replicator, "take", lambda: trainer._step == 6, wait_and_die)


@pytest.mark.parametrize("mode", soak_but(["late", "local int8"], ["int8", "powersgd", "late", "local", "local int8"]))
def test_a_copy_of_a_step_that_is_saved_goes_on_as_the_save_does(
    mode: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was settled for the save is settled again: the copy was made before."""
    monkeypatch.setattr(test_lost_ranks, "STEP", 5)
    plan = "dp=2" if mode.startswith("local") else "dp=2,zero=1"
    check(model, tmp_path, plan, copying_after_a_save, 0, **{"mirror_steps": 2, "save_steps": 2, **MODES[mode]})


@pytest.mark.parametrize(
    ("more", "plan"),
    [
        ({"gradient_compression": "int8"}, "dp=2"),
        ({"gradient_compression": "int8"}, "dp=2,zero=1"),
        ({"delay_steps": 1}, "dp=2,zero=1"),
        ({"local_steps": 2}, "dp=2"),
    ],
)
def test_copies_take_what_the_planner_says(more: dict[str, Any], plan: str, model: Path, tmp_path: Path) -> None:
    job = short_job(model, tmp_path / "run", max_steps=4, **more)
    run = Epochs(job)
    run.run(plan, "ab")
    copies = [copy for one in run.copies.values() for copy in one.complete() if copy is not one.live]
    found = sum(block.tensor.nbytes for copy in copies for block in copy.blocks)
    spec = open_initial_model(job).spec
    ranks = training_bytes(spec, Plan.parse(plan, spec.num_layers), training_facts(job, mirrored=True))
    assert sum(rank.copies for rank in ranks) == pytest.approx(found, rel=1e-3)


def test_with_both_keepers_of_a_residual_the_steps_after_the_save_are_lost(model: Path, tmp_path: Path) -> None:
    job = short_job(model, tmp_path / "run", max_steps=5, save_steps=2, gradient_compression="int8")
    want = records(train(replace(job, output_dir=str(tmp_path / "whole")), "dp=4"))
    run = Epochs(job)
    run.run("dp=4", "abcd", dict.fromkeys("ab", saved_and_told))
    again = began(run.run("dp=4", "abcd"))
    assert (again.origin, again.step) == ("save", 2)
    assert [one.loss for one in read_records(tmp_path / "run" / FILE)] == [one.loss for one in want]
    assert all(torch.equal(x, final(tmp_path / "whole")[name]) for name, x in final(tmp_path / "run").items())


def taking_turns(trainer: RankTrainer, die: Callable[[], None]) -> None:
    """After a step on one rank."""
    at(trainer._feed, "next", lambda: trainer._step == 7, die)


@pytest.mark.parametrize("mode", soak_but(["late int8"], ["int8", "late", "late int8"]))
def test_one_that_is_left_goes_on_from_memory_as_from_the_save(mode: str, model: Path, tmp_path: Path) -> None:
    """And two from its memory: what is dealt out anew is as good as what was settled."""
    for name, every in (("memory", 100), ("save", 4)):
        more = {"max_steps": 8, "save_steps": every, "mirror_steps": 2, "dtype": "float64", **MODES[mode]}
        run = Epochs(short_job(model, tmp_path / name, **more))
        run.run("dp=2,zero=1", "ab", dict.fromkeys("ab", copying_after_a_save), lives=True)
        if name == "save":
            run.copies.clear()
            shutil.copytree(tmp_path / "save-b" / "step-4", tmp_path / "save" / "step-4", dirs_exist_ok=True)
        again = began(run.run("pp=1", "a", {"a": taking_turns}, lives=True))
        assert (again.origin, again.step) == (name, 4)
        assert began(run.run("dp=2,zero=1", "az")).origin == "memory"
    off, name = furthest(final(tmp_path / "memory"), final(tmp_path / "save"))
    assert off < 1e-11, name
