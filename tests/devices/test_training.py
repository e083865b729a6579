"""Training on devices with memory of their own: the very run of the processor, to the bit, by every plan and task."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.parity.engine.test_few_bits import SIZES
from tests.support.device.separate_device import SEPARATE
from tests.support.models.families import save_model
from tests.support.training.post_training.preferences import preference_job, small_model
from tests.support.training.runs import final, job_for, records, rows_file, train
from tllm.comm.collectives.group import Group
from tllm.core.errors import ConfigError
from tllm.devices.choose import CPU
from tllm.devices.memory import forget_peak, held_memory, peak_memory
from tllm.kernels import library as kernel_library
from tllm.kernels.training import reproducible
from tllm.parallel.quantized_weight import PackedRows, quantized, stands_for, weight_bytes
from tllm.training import trainer
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job
from tllm.training.job.lora_job import LoraJob
from tllm.training.step import rank_model
from tllm.training.trainer import RankTrainer

SHORT: dict[str, Any] = dict(max_steps=2, save_steps=1)


@pytest.fixture(autouse=True)
def torch_s_own_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On both devices: the separate one has neither fused attention nor the processor's kernels.

    These are used where no gradients are wanted, as in an evaluation, and in products of deterministic runs, and round
    otherwise than torch's steps. So do prompts that are computed once for their completions, as on processors alone.
    """
    monkeypatch.setattr(kernel_library, "library", lambda: None)
    monkeypatch.setattr(reproducible, "library", lambda: None)
    monkeypatch.setattr(trainer, "with_shared_prompts", lambda config: config)
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


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp=4,tensor=2d", "tp=8,tensor=3d"])
def test_a_run_on_a_grid(plan: str, models: Path, tmp_path: Path) -> None:
    """What ranks exchange is handed to their group where it lies, which knows whether it has to go to the host."""
    made, given = {}, set[str]()
    exchange = Group.exchange

    def seen(group: Group, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        given.update(x.device.type for x in (*sends.values(), *recvs.values()))
        exchange(group, sends, recvs)

    for device in ("cpu", "separate"):
        (tmp_path / device).mkdir()
        given.clear()
        with mock.patch.object(Group, "exchange", seen):
            made[device] = ran(job_for(models / "dense", tmp_path / device / "run", **SHORT), plan, device)
        assert given == {device}
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "quantize", "dtype", "plan"),
    [
        ("dense", "int4", "float32", "pp=2"),
        ("dense", "int8", "float32", "dp=2,tp=2,zero=2"),
        ("dense", "int8", "float64", "tp=2"),
        ("experts", "int4", "float32", "pp=1,recompute=layer"),
        ("experts", "int8", "float64", "dp=2,ep=2"),
    ],
)
def test_an_adapter_beside_a_model_in_few_bits(
    model: str, quantize: str, dtype: str, plan: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products are the processor's to the bit, and gradients go through the weights' plain numbers piece by piece."""
    for name in ("PLAIN_AT_ONCE", "DEVICE_PLAIN_AT_ONCE"):
        monkeypatch.setattr(f"tllm.parallel.quantized_weight.{name}", 500)
    made = {}
    for device in ("cpu", "separate"):
        (tmp_path / device).mkdir()
        lora = LoraJob(r=2, target_modules=("all-linear",), lora_dropout=0.1, quantize=quantize)
        job = job_for(models / model, tmp_path / device / "run", lora=lora, dtype=dtype, **SHORT)
        made[device] = ran(job, plan, device)
    assert_equal(made["separate"], made["cpu"])


@pytest.mark.slow
def test_a_model_in_few_bits_comes_to_the_device_packed_and_piece_by_piece(tmp_path: Path) -> None:
    """Neither are its plain numbers there at once, nor is any part of it left with the host."""
    save_model("llama", tmp_path / "model", **{**SIZES, "intermediate_size": 4096})
    whole, held, peaks = 0, dict[str, int](), list[int]()

    def look(trainer: RankTrainer) -> None:
        nonlocal whole
        device = trainer.config.device
        parameters = [parameter for chunk in trainer._model.chunks for parameter in chunk.parameters()]
        parts = [part for one in parameters if (found := quantized(one)) is not None for part in found.parts]
        assert {x.device for part in parts if isinstance(part, PackedRows) for x in part.tensors.named().values()} == {
            device
        }
        assert {parameter.device for parameter in parameters} == {device}
        whole = sum(4 * math.prod(stands_for(parameter)[0]) for parameter in parameters)
        held[device.type] = sum(map(weight_bytes, parameters))
        if device != CPU:
            peaks.append(peak_memory(device))

    for device in (CPU, SEPARATE[0]):
        job = job_for(tmp_path / "model", tmp_path / device.type, lora=LoraJob(r=2, quantize="int4"), **SHORT)
        begun = held_memory(SEPARATE[0])
        forget_peak(SEPARATE[0])
        train(job, "pp=1", damage=look, devices=(device,))
    assert held["separate"] == held["cpu"] < whole / 6
    assert peaks[0] - begun < whole / 3


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
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_the_processor_alone_does_is_refused_by_name(why: str, models: Path, tmp_path: Path) -> None:
    plan, more = REFUSED[why]
    with pytest.raises(ConfigError, match=rf"{why}.*this rank computes on separate:\d"):
        train(job_for(models / "dense", tmp_path / "run", **SHORT, **more), plan, devices=SEPARATE)
