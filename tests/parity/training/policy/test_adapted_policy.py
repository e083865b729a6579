"""Adapters that learn from rewards: the engine samples with the adapter that is trained, and nothing is copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.training.post_training.policy_task import grpo, policy_job, write_task
from tests.support.training.runs import records, train
from tests.support.training.training_step import furthest
from tllm.training.job.job import Job
from tllm.training.job.lora_job import LoraJob
from tllm.training.policy.completions_file import COMPLETIONS
from tllm.training.report.metrics import StepRecord

DIFFERENCE = "sampling/sampling_logp_difference/mean"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned for a moment, as adapters begin from a folder."""
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    train(policy_job(folder, folder / "base", max_steps=2), "pp=1")
    return folder


def adapted_job(task: Path, run: Path, dtype: str = "float64", **more: Any) -> Job:
    """With a reference, and at a rate at which the second sampling is another one."""
    lora = LoraJob(r=4, lora_alpha=8.0, **more)
    begin = dict(config_name=None, tokenizer_name=None, model_name_or_path=str(task / "base" / "final"))
    return policy_job(task, run, grpo(task, beta=0.1), dtype=dtype, lora=lora, learning_rate=0.05, **begin)


def metric(record: StepRecord, name: str) -> float:
    assert record.metrics is not None
    return record.metrics[name]


@pytest.mark.parametrize(("plan", "use_dora"), [("dp=2,zero=1", False), ("pp=2,tp=1+2", True)])
def test_every_plan_is_one_process(plan: str, use_dora: bool, task: Path, tmp_path: Path) -> None:
    want = records(train(adapted_job(task, tmp_path / "alone", use_dora=use_dora), "pp=1"))
    got = records(train(adapted_job(task, tmp_path / "cut", use_dora=use_dora), plan))
    assert (tmp_path / "cut" / COMPLETIONS).read_text() == (tmp_path / "alone" / COMPLETIONS).read_text()
    for one, other in zip(got, want, strict=True):
        assert abs(one.loss - other.loss) < 1e-12
        assert metric(one, DIFFERENCE) < 1e-13, "the engine samples with what is trained"
        assert abs(metric(one, "kl") - metric(other, "kl")) < 1e-12
    assert metric(want[0], "kl") == 0 < metric(want[-1], "kl"), "the reference is the model without its adapter"
    name = "final/adapter_model.safetensors"
    off, where = furthest(load_file(tmp_path / "cut" / name), load_file(tmp_path / "alone" / name))
    assert off < 1e-9, where


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", "none"), ("bfloat16", "none"), ("float32", "int8")])
def test_it_samples_with_the_adapter_in_every_form_of_the_model(
    dtype: str, quantize: str, task: Path, tmp_path: Path
) -> None:
    """An adapter is wider than a model in bfloat16, and plain beside one in few bits."""
    got = records(train(adapted_job(task, tmp_path / "run", dtype, quantize=quantize), "pp=1"))
    limit = {"float32": 1e-5, "bfloat16": 0.05}[dtype]
    assert all(metric(one, DIFFERENCE) < limit for one in got), [metric(one, DIFFERENCE) for one in got]
    assert metric(got[-1], "kl") > 0
