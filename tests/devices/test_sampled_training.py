"""Runs that sample completions on devices with memory of their own: those of the processor, and with graphs or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from tests.support.device.separate_device import SEPARATE
from tests.support.training.post_training.distilled_task import on_policy_job, write_models
from tests.support.training.post_training.policy_task import CONFIG, grpo, policy_job, write_task
from tests.support.training.post_training.rollout_servers import sampling
from tests.support.training.post_training.teachers import address_of
from tests.support.training.post_training.told_runs import Told, check_same_run, check_same_steps
from tests.support.training.runs import final, records, train
from tests.support.training.training_step import furthest
from tllm.core.errors import ConfigError
from tllm.devices.choose import CPU
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.compute.paged_attention import PagedAttend
from tllm.engine.compute.positions import positions
from tllm.engine.schedule.batch import Batch
from tllm.engine.schedule.limits import Limits
from tllm.model.transformer import Transformer
from tllm.node.roles import colocated_rollouts
from tllm.node.roles.rollout_model import RolloutModel
from tllm.training.job.job import Job, encode_job
from tllm.training.job.lora_job import LoraJob
from tllm.training.job.rollout_keys import RejectionConfig
from tllm.training.objectives.rollout_correction import MISMATCH_METRICS
from tllm.training.rollout_servers.rollout_messages import RolloutRun

SHORT: dict[str, Any] = dict(max_steps=2, save_steps=2, dtype="float64")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The counting task, a model with weights, and a teacher with its student."""
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    write_models(folder)
    return folder


def ran(job: Job, plan: str, devices: Sequence[torch.device] = (CPU,)) -> Told:
    """Records of the steps, the weights in the end, and what was sampled to be read."""
    told, run = records(train(job, plan, devices=devices)), Path(job.output_dir)
    metrics = [{"eval_loss": one.eval_loss or 0.0, **(one.metrics or {})} for one in told]
    told = [msgspec.structs.replace(one, metrics=some) for one, some in zip(told, metrics, strict=True)]
    return told, final(run), "".join(file.read_text() for file in sorted(run.glob("*completions.jsonl")))


def grpo_job(task: Path, run: Path, **more: Any) -> Job:
    """With a reference, and two steps on the same completions."""
    return policy_job(task, run, grpo(task, beta=0.1, num_iterations=2), **{**SHORT, **more})


def adapter_job(task: Path, run: Path, quantize: str = "none", **more: Any) -> Job:
    beginning = dict(config_name=None, tokenizer_name=None, model_name_or_path=str(task / "student"))
    lora = LoraJob(r=2, target_modules=("all-linear",), quantize=quantize)
    return grpo_job(task, run, **beginning, lora=lora, **more)


def rounded_job(task: Path, run: Path) -> Job:
    """Beside the numbers that weights in few bits stand for."""
    return adapter_job(task, run, "int8")


def rejection_job(task: Path, run: Path) -> Job:
    functions = (f"{task / 'rewards.py'}:closeness",)
    table = RejectionConfig(reward_funcs=functions, num_generations=4, max_completion_length=8, keep=2)
    return policy_job(task, run, table, **SHORT)


def distilling_job(task: Path, run: Path) -> Job:
    return on_policy_job(task, run, max_steps=2, distill={"lmbda": 1.0})


def read_job(task: Path, run: Path) -> Job:
    """What is written to some rows held out, the likeliest token each time."""
    job, rows = rejection_job(task, run), (str(task / "rows.jsonl"),)
    asked = dict(task="sft", rejection=None, packing=False, eval_steps=1, eval_num_prompts=3, eval_max_new_tokens=6)
    return replace(job, train_files=rows, eval_files=rows, **asked)  # type: ignore[arg-type]


CASES = {
    "grpo": (grpo_job, ("pp=1", "dp=2", "pp=2,tp=2")),
    "adapter": (adapter_job, ("dp=2",)),
    "rounded": (rounded_job, ("tp=2",)),
    "rejection": (rejection_job, ("pp=1",)),
    "distill": (distilling_job, ("dp=2",)),
    "read": (read_job, ("pp=1",)),
}


MIXED = (*SEPARATE[:3], CPU)
"""Of four ranks the last is on the processor."""


@pytest.mark.parametrize("case", CASES)
def test_a_run_samples_and_learns_what_it_does_on_the_processor(case: str, task: Path, tmp_path: Path) -> None:
    make, plans = CASES[case]
    want = ran(make(task, tmp_path / "cpu"), "pp=1")
    assert '"completion":' in want[2] or case == "distill"
    for plan in plans:
        check_same_run(ran(make(task, tmp_path / plan), plan, MIXED), want)


def test_completions_of_a_model_in_few_bits_are_sampled_with_what_is_trained(task: Path, tmp_path: Path) -> None:
    """By the same products: what attention rounds otherwise may move an input of theirs by one of 255 steps."""
    job = adapter_job(task, tmp_path / "run", "int8", dtype="float32")
    steps, weights, _ = ran(job, "pp=1", SEPARATE)
    assert len(steps) == 2 and weights and all(torch.isfinite(x).all() for x in weights.values())
    for one in steps:
        assert one.metrics is not None and 0 <= one.metrics[MISMATCH_METRICS[0]] < 0.01


class PlayedWeights:
    """What graphs of a stage do, without any: layers are computed with the memory that the weights had at first."""

    made: ClassVar[list[PlayedWeights]] = []

    def __init__(self, model: Transformer, cache: KVCache, limits: Limits) -> None:
        self._model, self._cache = model, cache
        self._recorded = {name: parameter.data for name, parameter in model.named_parameters()}
        self.batches = 0
        self.made.append(self)

    def takes(self, batch: Batch) -> bool:
        return len(batch.entries) == len(batch.token_ids)

    def __call__(self, batch: Batch, x_TD: Tensor | None) -> Tensor:
        self.batches += 1
        ids_T = torch.tensor(batch.token_ids).to(self._cache.device)
        x = ids_T if x_TD is None else x_TD.to(self._cache.device)
        inputs = x, positions(batch, self._cache.device), PagedAttend(self._cache, batch.entries)
        found: Tensor = functional_call(self._model, self._recorded, inputs, dict(ids_T=ids_T))
        return found


def test_recorded_layers_have_the_weights_that_are_trained(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are recorded once, after the learner has moved the weights; if before, they would never change."""
    want = ran(grpo_job(task, tmp_path / "layers", max_steps=4), "pp=2", SEPARATE)
    monkeypatch.setattr(PlayedWeights, "made", [])
    monkeypatch.setattr(colocated_rollouts, "decode_graphs", PlayedWeights)
    got = ran(grpo_job(task, tmp_path / "recorded", max_steps=4), "pp=2", SEPARATE)
    check_same_run(got, want)
    assert len(PlayedWeights.made) == 2 and all(one.batches > 8 for one in PlayedWeights.made), "once on each stage"


def test_what_has_the_bits_of_the_processor_s_kernels_is_refused(task: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"deterministic completions.*separate:0"):
        train(grpo_job(task, tmp_path / "run", deterministic=True), "pp=1", devices=SEPARATE)


def test_a_server_samples_on_its_device_for_a_run_on_others(task: Path, tmp_path: Path) -> None:
    want = ran(grpo_job(task, tmp_path / "cpu"), "pp=1")
    model = RolloutModel.open(str(task), SEPARATE[7])
    with sampling(task, tmp_path / "key", model) as server:
        job = grpo_job(task, tmp_path / "apart")
        assert job.grpo is not None
        table = replace(job.grpo, rollout_servers=(address_of(server),), rollout_secret=str(tmp_path / "key"))
        steps, weights, completions = ran(replace(job, grpo=table), "dp=2", SEPARATE)
    check_same_steps(steps, want[0])
    assert furthest(weights, want[1])[0] < 1e-11 and completions == want[2]
    asks = RolloutRun(encode_job(replace(job, deterministic=True)), json.dumps(CONFIG), "")
    with pytest.raises(ConfigError, match=r"deterministic completions.*separate:7"):
        model.open_session(asks)
