"""Runs that send less, keep less or balance experts: what they must still be, whatever the plan."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.families import save_model
from tests.support.selection import soak_but
from tests.support.training.runs import final, job_for, records, short_job, train
from tests.support.training.training_step import furthest
from tllm.core.errors import NonFiniteError
from tllm.training.job.job import Job
from tllm.training.report.metrics import StepRecord
from tllm.training.sync.learner import SynchronousLearner

ExactRun = Callable[[str], tuple[list[StepRecord], Path]]
"""The run under a plan that sends everything: its records, and its folder."""

WAYS = {
    "bf16": dict(gradient_compression="bf16"),
    "int8": dict(gradient_compression="int8"),
    "powersgd": dict(gradient_compression="powersgd", powersgd_rank=2),
    "local": dict(local_steps=3),
    "local int8": dict(local_steps=2, gradient_compression="int8"),
    "late": dict(delay_steps=1),
    "late bf16": dict(delay_steps=1, gradient_compression="bf16"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


def digest(run: Path) -> str:
    """Of all weights by name."""
    tensors = final(run)
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()


def twelve(model: Path, run: Path, **more: Any) -> Job:
    """As many steps as show that a loss falls."""
    return job_for(model, run, max_steps=12, **more)


@pytest.fixture(scope="module")
def exact_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> ExactRun:
    """Of 12 steps, once for each plan."""

    @functools.cache
    def under(plan: str) -> tuple[list[StepRecord], Path]:
        folder = tmp_path_factory.mktemp("exact")
        return records(train(twelve(model, folder / "run", save_steps=12), plan)), folder / "run"

    return under


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plan", soak_but(["dp=2"], ["dp=2", "dp=2,pp=2,tp=2"]))
def test_a_way_to_send_less_learns_nearly_the_same(
    way: str, plan: str, model: Path, exact_run: ExactRun, tmp_path: Path
) -> None:
    more: dict[str, Any] = WAYS[way]
    exact, of_exact = exact_run(plan)
    job = twelve(model, tmp_path / "run", save_steps=6, **more)
    got = records(train(job, plan))
    assert [record.step for record in got] == list(range(1, 13))
    assert got[-1].loss < got[0].loss
    assert abs(got[-1].loss - exact[-1].loss) < 0.05 * exact[-1].loss
    assert furthest(final(tmp_path / "run"), final(of_exact))[0] > 0
    sums = [sum(record.bytes_sent for record in some[1:6]) for some in (got, exact)]
    assert sums[0] < sums[1] or "late" in way


@pytest.mark.slow
@pytest.mark.parametrize("way", soak_but(["int8", "powersgd", "local int8", "late"], WAYS))
def test_to_stop_and_go_on_is_not_to_be_seen(way: str, model: Path, tmp_path: Path) -> None:
    """A save brings what is under way to the weights, so a run that was stopped there is the run that was not."""
    more: dict[str, Any] = dict(WAYS[way], max_steps=4, save_steps=2, dtype="float64", lr_scheduler_type="constant")
    train(short_job(model, tmp_path / "whole", **more), "dp=2")
    train(short_job(model, tmp_path / "parts", **dict(more, max_steps=2)), "dp=2")
    train(short_job(model, tmp_path / "parts", **more), "dp=2")
    off, name = furthest(final(tmp_path / "parts"), final(tmp_path / "whole"))
    assert off < (1e-12 if "powersgd" not in way else 1e-6), name


def test_a_loss_that_is_no_number_ends_its_own_step_though_sums_come_late(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = SynchronousLearner.apply_gradients

    def at_step_3(learner: SynchronousLearner, step: int, learning_rate: float, loss_sum: float) -> float:
        return apply(learner, step, learning_rate, math.nan if step == 3 else loss_sum)

    monkeypatch.setattr(SynchronousLearner, "apply_gradients", at_step_3)
    with pytest.raises(NonFiniteError, match=r"step 3 went bad: the loss is nan on rank 0"):
        train(short_job(model, tmp_path / "run", delay_steps=1), "dp=2")


@pytest.mark.slow
def test_deterministic_runs_end_in_the_same_bits(model: Path, tmp_path: Path) -> None:
    """2 steps; dp 1, 2, 4, 8 with ZeRO 1 to 3, pp, and a stop at step 1 that goes on under another plan."""
    more: dict[str, Any] = dict(
        deterministic=True, global_batch_size=8, max_steps=2, save_steps=1, lr_scheduler_type="constant"
    )
    digests = {}
    torch.set_num_threads(1)
    for plan in ("pp=1", "dp=8,zero=3", "dp=2,pp=2,zero=2,schedule=zero_bubble"):
        train(short_job(model, tmp_path / plan, **more), plan)
        digests[plan] = digest(tmp_path / plan)
    train(short_job(model, tmp_path / "parts", **dict(more, max_steps=1)), "dp=4,zero=1")
    train(short_job(model, tmp_path / "parts", **more), "dp=2,pp=4")
    digests["parts"] = digest(tmp_path / "parts")
    assert len(set(digests.values())) == 1, digests


@pytest.mark.slow
def test_experts_are_balanced_alike_under_every_plan(tmp_path: Path) -> None:
    save_model("qwen3_moe", tmp_path / "model")
    more: dict[str, Any] = dict(router_aux_loss_coef=0.1, dtype="float64", max_steps=2)
    want = records(train(short_job(tmp_path / "model", tmp_path / "one", **more), "pp=1"))
    plain = records(train(short_job(tmp_path / "model", tmp_path / "plain", dtype="float64", max_steps=2), "pp=1"))
    assert want[-1].aux_loss is not None and plain[-1].aux_loss is None
    assert want[-1].loss != plain[-1].loss
    for plan in ("dp=2,pp=2,tp=2,experts=spread", "dp=4,ep=2,zero=2,recompute=layer"):
        got = records(train(short_job(tmp_path / "model", tmp_path / plan, **more), plan))
        for a, b in zip(got, want, strict=True):
            assert a.aux_loss is not None and b.aux_loss is not None
            assert abs(a.loss - b.loss) < 1e-12 * b.loss and abs(a.aux_loss - b.aux_loss) < 1e-12 * b.aux_loss, plan
        assert furthest(final(tmp_path / plan), final(tmp_path / "one"))[0] < 1e-11


ALONE = {
    "local": (dict(local_steps=2, outer_learning_rate=1.0, outer_momentum=0.0), "dp=2"),
    "stale": (dict(max_staleness=1), "dp=2,servers=1"),
}
"""Ways in which a replica's gradient is of its own tokens, and a plan for each."""


@pytest.mark.slow
@pytest.mark.parametrize("way", ALONE)
def test_a_replica_that_learns_alone_balances_experts_as_much(way: str, tmp_path: Path) -> None:
    """Two replicas of the same rows take the steps that one takes: the load-balance loss is not halved between them."""
    save_model("qwen3_moe", tmp_path / "model")
    rows = tmp_path / "alike.jsonl"
    rows.write_text(json.dumps({"input_ids": list(range(1, 20))}) + "\n")
    plain: dict[str, Any] = dict(optimizer="sgd", momentum=0.0, lr_scheduler_type="constant", learning_rate=0.05)
    plain |= dict(router_aux_loss_coef=1.0, dtype="float64", max_steps=2, save_steps=2, train_files=(str(rows),))
    more, plan = ALONE[way]
    one = short_job(tmp_path / "model", tmp_path / "one", **plain, global_batch_size=2)
    two = short_job(tmp_path / "model", tmp_path / "two", **plain, global_batch_size=4, **more)
    want, got = records(train(one, "pp=1")), records(train(two, plan))
    assert got[0].grad_norm == pytest.approx(want[0].grad_norm, rel=1e-12)
    assert got[0].aux_loss == pytest.approx(want[0].aux_loss, rel=1e-12)
    if way == "local":
        assert furthest(final(tmp_path / "two"), final(tmp_path / "one"))[0] < 1e-12
