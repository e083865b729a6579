"""Runs whose ranks share a machine and have a device each, with gloo in NCCL's place: the bits of the runs by links."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support.comm.gloo_devices import GlooDevices
from tests.support.models.families import save_model
from tests.support.selection import soak_but
from tests.support.training.runs import final, records, short_job, train
from tllm.comm.nccl.device_channel import DeviceChannel

SHORT = [("dp=2,tp=2,zero=2,sequence=true", "llama"), ("dp=4,ep=2,experts=spread,zero=1", "qwen3_moe")]
LONG = [("tp=2,dp=2", "llama"), ("dp=2,cp=2,zero=3,recompute=layer", "llama"), ("tp=4,tensor=2d", "llama")]


@pytest.mark.parametrize(("plan", "family"), soak_but(SHORT, SHORT + LONG))
def test_a_run_has_the_bits_of_the_run_by_links(plan: str, family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path / "model")
    ran = []
    for name, backend in (("links", None), ("devices", GlooDevices())):
        (tmp_path / name).mkdir()
        job = short_job(tmp_path / "model", tmp_path / name / "run", max_steps=2, save_steps=2)
        with mock.patch.object(DeviceChannel, "exchange", autospec=True, side_effect=DeviceChannel.exchange) as used:
            told = records(train(job, plan, backend=backend))
        assert bool(used.call_count) == (backend is not None)
        ran.append(([one.loss for one in told], final(Path(job.output_dir))))
    (losses, weights), (want, truth) = ran
    assert losses == want and len(want) == 2
    assert weights.keys() == truth.keys() and all(torch.equal(x, truth[name]) for name, x in weights.items())
