"""Training on devices with memory of their own: the very run of the processor, to the bit, by every plan and task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.device.separate_device import SEPARATE
from tests.support.training.post_training.preferences import preference_job, small_model
from tests.support.training.runs import final, job_for, records, rows_file, train
from tllm.core.errors import ConfigError
from tllm.devices.choose import CPU
from tllm.kernels import row_operations
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job
from tllm.training.job.lora_job import LoraJob
from tllm.training.step import rank_model

SHORT: dict[str, Any] = dict(max_steps=2, save_steps=1)


@pytest.fixture(autouse=True)
def torch_s_own_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On both devices: the separate one has neither fused attention nor the processor's kernels.

    These are used where no gradients are wanted, as in an evaluation, and round otherwise than torch's steps.
    """
    monkeypatch.setattr(row_operations, "library", lambda: None)
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    small_model("qwen3_moe", folder / "experts")
    small_model("llama", folder / "dense")
    return folder


Numbers = tuple[list[tuple[float, ...]], dict[str, Tensor]]


def ran(job: Job, plan: str, device: str) -> Numbers:
    """What was reported of each step, and the weights in the end."""
    told = records(train(job, plan, devices=SEPARATE if device == "separate" else (CPU,)))
    steps = [
        (one.loss, one.grad_norm, one.aux_loss or 0.0, one.eval_loss or 0.0, *(one.metrics or {}).values())
        for one in told
    ]
    return steps, final(Path(job.output_dir))


def assert_equal(got: Numbers, want: Numbers, steps: int = 2) -> None:
    assert len(want[0]) == steps and got[0] == want[0]
    assert want[1] and all(torch.equal(got[1][name], x) for name, x in want[1].items())


PLANS = [
    "pp=1",
    "dp=2,zero=1",
    "dp=2,zero=3,recompute=layer",
    "pp=2,tp=2,schedule=zero_bubble",
    "tp=2,sequence=true",
    "cp=2",
    "dp=2,ep=2,zero=2",
    "pp=1,offload=host",
]


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_under_a_plan(plan: str, models: Path, tmp_path: Path) -> None:
    made = {}
    for device in ("cpu", "separate"):
        (tmp_path / device).mkdir()
        made[device] = ran(job_for(models / "experts", tmp_path / device / "run", **SHORT), plan, device)
    assert_equal(made["separate"], made["cpu"])


LORA = LoraJob(r=2, target_modules=("all-linear",), lora_dropout=0.1)

OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": dict(dtype="bfloat16"),
    "float64": dict(dtype="float64"),
    "deterministic": dict(deterministic=True),
    "sgd": dict(optimizer="sgd"),
    "int8": dict(gradient_compression="int8"),
    "bf16": dict(gradient_compression="bf16"),
    "powersgd": dict(gradient_compression="powersgd"),
    "DiLoCo": dict(local_steps=2),
    "late": dict(delay_steps=1),
    "balanced": dict(router_aux_loss_coef=0.01),
    "random": dict(model_name_or_path=None),
    "held out": dict(eval_steps=1),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_run_with_an_option_of_its_job(option: str, models: Path, tmp_path: Path) -> None:
    made, model = {}, models / "experts"
    for device in ("cpu", "separate"):
        (tmp_path / device).mkdir()
        more = {**SHORT, **OPTIONS[option]}
        if option == "random":
            more["config_name"] = str(model)
        if option == "held out":
            more["eval_files"] = (str(rows_file(tmp_path / "held_out.jsonl", 6, seed=9)),)
        made[device] = ran(job_for(model, tmp_path / device / "run", **more), "dp=2", device)
    assert_equal(made["separate"], made["cpu"])


@pytest.mark.parametrize("task", ["dpo", "kto", "orpo", "reward"])
def test_a_task_of_preferences(task: str, models: Path, tmp_path: Path) -> None:
    made = {}
    for device in ("cpu", "separate"):
        (tmp_path / device).mkdir()
        job = preference_job(models / "dense", tmp_path / device / "run", task, **SHORT)
        made[device] = ran(job, "dp=2", device)
    assert_equal(made["separate"], made["cpu"])


def test_distillation(models: Path, tmp_path: Path) -> None:
    made = {}
    keys = DistillationKeys(teacher_model_name_or_path=str(models / "dense"), top_k=5)
    for device in ("cpu", "separate"):
        (tmp_path / device).mkdir()
        job = job_for(models / "experts", tmp_path / device / "run", task="distill", distill=keys, **SHORT)
        made[device] = ran(job, "dp=2", device)
    assert_equal(made["separate"], made["cpu"])


def test_an_adapter_beside_a_model(models: Path, tmp_path: Path) -> None:
    made = {}
    for device in ("cpu", "separate"):
        (tmp_path / device).mkdir()
        job = job_for(models / "dense", tmp_path / device / "run", lora=LORA, **SHORT)
        made[device] = ran(job, "pp=2", device)
    assert_equal(made["separate"], made["cpu"])


def test_a_run_goes_on_from_its_save_on_another_device(models: Path, tmp_path: Path) -> None:
    """One step on the processor and one on the device are two steps of either."""
    want = ran(job_for(models / "experts", tmp_path / "whole", **SHORT), "pp=1", "cpu")
    job = job_for(models / "experts", tmp_path / "parts", **SHORT)
    steps = iter([True])
    first = records(train(job, "pp=1", lambda: next(steps, False)))
    assert len(first) == 1
    assert_equal(ran(job, "pp=1", "separate"), (want[0][1:], want[1]), steps=1)


def test_labels_are_asked_before_they_come_to_a_device(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's kernel reads the logit of a label wherever that is, and to ask it there would be to wait for it."""

    def refused(labels_T: Tensor, size: int) -> None:
        assert labels_T.is_cpu
        raise ConfigError(f"none of {size} words")

    monkeypatch.setattr(rank_model, "check_labels", refused)
    with pytest.raises(ConfigError, match="none of 101 words"):
        train(job_for(models / "dense", tmp_path / "run", **SHORT), "pp=1", devices=SEPARATE)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "servers=1, which sum on processors": ("dp=2,servers=1", {}),
    "an adapter's model in few bits": ("pp=1", dict(lora=LoraJob(r=2, quantize="int8"))),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_the_processor_alone_does_is_refused_by_name(why: str, models: Path, tmp_path: Path) -> None:
    plan, more = REFUSED[why]
    with pytest.raises(ConfigError, match=rf"{why}.*this rank computes on separate:\d"):
        train(job_for(models / "dense", tmp_path / "run", **SHORT, **more), plan, devices=SEPARATE)
