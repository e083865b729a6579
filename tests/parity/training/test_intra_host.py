"""Runs whose ranks share a machine and have a device each, with gloo in NCCL's place: the bits of the runs by links."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support.comm.fixed_choice import ByHost
from tests.support.comm.gloo_devices import GlooDevices
from tests.support.models.families import save_model
from tests.support.selection import soak_but
from tests.support.training.runs import final, records, short_job, train
from tllm.comm.collectives.reduce_scatter import HierarchicalAllGather, HierarchicalReduceScatter
from tllm.comm.nccl.device_channel import DeviceChannel
from tllm.training.trainer import RankTrainer

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


@pytest.mark.parametrize("plan", ["dp=4,zero=2", "dp=4,zero=3"])
def test_zero_over_machines_has_the_bits_of_the_direct_way(plan: str, tmp_path: Path) -> None:
    """Two ranks on each of two machines: gradients and weights go through each machine first."""
    save_model("llama", tmp_path / "model")

    def by_host(trainer: RankTrainer) -> None:
        trainer.config.groups.dp.choice = ByHost(4, 2)

    ran = []
    for name, change in (("direct", lambda trainer: None), ("by host", by_host)):
        (tmp_path / name).mkdir()
        more = dict(max_steps=2, save_steps=2, deterministic=True)
        job = short_job(tmp_path / "model", tmp_path / name / "run", **more)
        scatter, gather = (
            mock.patch.object(way, "__call__", autospec=True, side_effect=way.__call__)
            for way in (HierarchicalReduceScatter, HierarchicalAllGather)
        )
        with scatter as scattered, gather as gathered:
            told = records(train(job, plan, damage=change))
        assert {bool(scattered.call_count), bool(gathered.call_count)} == {name == "by host"}
        ran.append(([(one.loss, one.grad_norm) for one in told], final(Path(job.output_dir))))
    (steps, weights), (want, truth) = ran
    assert steps == want and len(want) == 2
    assert weights.keys() == truth.keys() and all(torch.equal(x, truth[name]) for name, x in weights.items())
