"""A rank is lost where each replica has something of its own: what it has not sent yet, or weights of local steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity import test_lost_ranks
from tests.parity.test_lost_ranks import check, computing, model, saving, sending, short_peak, told, updating
from tests.support.epochs import Epochs, Hurt
from tests.support.runs import job_for
from tllm.planner.training import training_bytes
from tllm.spec.plan import Plan
from tllm.train.job_parts import training_facts
from tllm.train.start import begin

__all__ = ["model", "short_peak"]  # fixtures

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


@pytest.mark.parametrize(
    ("mode", "plan", "moment", "lost"),
    [
        ("int8", "dp=2", computing, 1),
        ("int8", "dp=2,zero=1", saving, 0),
        ("int8", "dp=2,pp=2,zero=1", sending, 2),
        ("powersgd", "dp=2", updating, 0),
        ("powersgd", "dp=2,pp=2,zero=1", told, 3),
        ("powersgd", "dp=2", saving, 1),
        ("late", "dp=2", computing, 0),
        ("late", "dp=2,zero=1", sending, 1),
        ("late", "dp=2", saving, 1),
        ("late int8", "dp=2", updating, 1),
        ("late powersgd", "dp=2", sending, 0),
    ],
)
def test_the_same_plan_goes_on_to_the_bit(
    mode: str, plan: str, moment: Hurt, lost: int, model: Path, tmp_path: Path
) -> None:
    check(model, tmp_path, plan, moment, lost, **MODES[mode])


@pytest.mark.parametrize(
    ("mode", "plan", "moment", "lost"),
    [
        ("local", "dp=2", computing, 1),
        ("local", "dp=2", saving, 0),
        ("local", "dp=2,pp=2", updating, 2),
        ("local int8", "dp=2", told, 0),
        ("local powersgd", "dp=2", told, 1),
    ],
)
def test_local_steps_go_on_from_an_outer_step(
    mode: str, plan: str, moment: Hurt, lost: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two copies one is whole: that of the last outer step, or the one before while that is on its way."""
    monkeypatch.setattr(test_lost_ranks, "STEP", 5)
    check(model, tmp_path, plan, moment, lost, behind=3, **MODES[mode])


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_of_a_step_that_is_saved_goes_on_as_the_save_does(
    mode: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was settled for the save is settled again: the copy was made before."""
    monkeypatch.setattr(test_lost_ranks, "STEP", 5)
    check(model, tmp_path, "dp=2", told, 1, behind=3, **{"mirror_steps": 2, "save_steps": 2, **MODES[mode]})


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
    job = job_for(model, tmp_path / "run", max_steps=4, **more)
    run = Epochs(job)
    run.run(plan, "ab")
    found = sum(block.tensor.nbytes for one in run.copies.values() for copy in one.whole() for block in copy.blocks)
    spec = begin(job).spec
    ranks = training_bytes(spec, Plan.parse(plan, spec.num_layers), training_facts(job, mirrored=True))
    assert sum(rank.copies for rank in ranks) == pytest.approx(found, rel=1e-3)
