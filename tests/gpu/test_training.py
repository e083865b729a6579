"""Training on CUDA: the losses and weights of the processor's float64, within what another order of sums changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.models.families import save_model
from tests.support.training.runs import final, job_for, records, train
from tllm.devices.choose import CPU

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
def test_a_run_on_cuda_is_the_run_on_the_processor(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path / "model")
    made = {}
    for device in (CPU, torch.device("cuda", 0)):
        (tmp_path / device.type).mkdir()
        job = job_for(tmp_path / "model", tmp_path / device.type / "run", dtype="float64")
        told = records(train(job, "pp=1", devices=(device,)))
        made[device.type] = [one.loss for one in told], final(Path(job.output_dir))
    (losses, weights), (want, kept) = made["cuda"], made["cpu"]
    assert len(want) == 6 and max(abs(a - b) / b for a, b in zip(losses, want, strict=True)) < 1e-12
    assert max(float((weights[name] - x).abs().max()) for name, x in kept.items()) < 1e-10
