"""With `deterministic = true` importance ratios of what engines sample are 1, exactly; each mistake shows in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.support.selection import pairs_in_turn, soak_but
from tests.support.training.post_training.policy_task import grpo, policy_job, write_task
from tests.support.training.runs import final, records, train
from tllm.node.roles import colocated_rollouts as role
from tllm.spec.request import Request
from tllm.training.data.packing import PackedRow
from tllm.training.job.job import Job
from tllm.training.job.lora_job import LoraJob
from tllm.training.objectives.policy_gradient import SAMPLED
from tllm.training.objectives.rollout_correction import DIFFERENCE, RATIO
from tllm.training.policy import rewarded_rows
from tllm.training.policy.completions_file import COMPLETIONS
from tllm.training.report.metrics import StepRecord

KIN: dict[str, dict[str, Any]] = {
    "grpo": dict(loss_type="grpo", beta=0.04),
    "dr_grpo": dict(loss_type="dr_grpo", scale_rewards="none"),
    "dapo": dict(loss_type="dapo", epsilon_high=0.28, mask_truncated_completions=True),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
    "rloo": dict(loss_type="dr_grpo", advantage="rloo", scale_rewards="none"),
}
PLANS = (
    "dp=2",
    "dp=4,zero=1",
    "pp=2",
    "dp=2,pp=2,zero=2,recompute=layer",
    "pp=2,schedule=zero_bubble",
)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The counting task, with heads of sixteen numbers."""
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "head_dim": 16}))
    return folder


def job_of(task: Path, run: Path, lora: LoraJob | None = None, **table: Any) -> Job:
    """Steps at a rate at which each sampling is another one, at a temperature."""
    keys: dict[str, Any] = dict(num_completions_to_print=16, temperature=0.9) | table
    return policy_job(task, run, grpo(task, **keys), deterministic=True, learning_rate=0.05, lora=lora)


def mismatch(record: StepRecord) -> tuple[float, ...]:
    metrics = record.metrics or {}
    return tuple(metrics[f"{DIFFERENCE}/{of}"] for of in ("mean", "max")) + tuple(
        metrics[f"{RATIO}/{of}"] for of in ("min", "mean", "max")
    )


NONE = (0.0, 0.0, 1.0, 1.0, 1.0)


@pytest.fixture(scope="module")
def alone(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each kind's run in one process, made once."""
    folder, made = tmp_path_factory.mktemp("alone"), dict[str, list[StepRecord]]()

    def run(kin: str) -> Path:
        if kin not in made:
            made[kin] = records(train(job_of(task, folder / kin, **KIN[kin]), "pp=1"))
            assert [mismatch(record) for record in made[kin]] == [NONE] * 4
        return folder / kin

    return run


@pytest.mark.parametrize(("kin", "plan"), pairs_in_turn(KIN, PLANS, 1))
def test_every_ratio_is_one_and_every_plan_is_one_process(
    kin: str, plan: str, task: Path, alone: Callable[[str], Path], tmp_path: Path
) -> None:
    got = records(train(job_of(task, tmp_path / "run", **KIN[kin]), plan))
    assert [mismatch(record) for record in got] == [NONE] * 4
    assert len({record.loss for record in got}) > 1 and all((record.metrics or {})["entropy"] > 0.1 for record in got)
    want = alone(kin)
    assert (tmp_path / "run" / COMPLETIONS).read_bytes() == (want / COMPLETIONS).read_bytes()
    mine, others = final(tmp_path / "run"), final(want)
    assert all(torch.equal(mine[name], others[name]) for name in others)


def test_a_later_pass_has_other_ratios_and_compares_the_same(task: Path, tmp_path: Path) -> None:
    first, second, third, _ = records(train(job_of(task, tmp_path / "run", num_iterations=2, beta=0.1), "dp=2"))
    assert mismatch(first) == mismatch(second) == mismatch(third) == NONE, "the old ones are those of the first pass"
    assert (first.metrics or {})["clip_ratio/region_mean"] == 0 < (second.metrics or {})["clip_ratio/region_mean"]
    assert (first.metrics or {})["kl"] == 0 < (third.metrics or {})["kl"]


MIXTRAL = dict(model_type="mixtral", architectures=["MixtralForCausalLM"], num_local_experts=4, num_experts_per_tok=2)
DEEPSEEK = dict(
    model_type="deepseek_v2",
    architectures=["DeepseekV2ForCausalLM"],
    kv_lora_rank=16,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_shared_experts=1,
    first_k_dense_replace=1,
    topk_method="greedy",
    norm_topk_prob=False,
)
ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dora": (dict(use_dora=True), {}),
    "int8": (dict(quantize="int8"), {}),
    "dora of int8": (dict(use_dora=True, quantize="int8"), {}),
    "experts": (dict(target_modules=("w1", "w2", "w3", "q_proj")), MIXTRAL),
    "experts of int8": (dict(target_modules=("w1", "w2", "w3"), quantize="int8"), MIXTRAL),
    "latents": (dict(target_modules=("kv_b_proj", "q_proj")), DEEPSEEK),
}
"""What is adapted and how, and what the model's config says else."""


@pytest.mark.parametrize("case", soak_but(["dora of int8", "experts", "latents"], ADAPTERS))
def test_an_adapter_is_sampled_with_as_it_is_trained(case: str, task: Path, tmp_path: Path) -> None:
    (lora, config), own = ADAPTERS[case], shutil.copytree(task, tmp_path / "task")
    keys = json.loads((own / "config.json").read_text())
    heads = dict(num_key_value_heads=keys["num_attention_heads"]) if "kv_lora_rank" in config else {}
    (own / "config.json").write_text(json.dumps({**keys, **config, **heads}))
    train(policy_job(own, tmp_path / "base", max_steps=2), "pp=1")
    assert [mismatch(record) for record in records(train(adapted(own, tmp_path, **lora), "dp=2"))] == [NONE] * 4


def adapted(task: Path, folder: Path, **lora: Any) -> Job:
    job = job_of(task, folder / "run", LoraJob(r=4, lora_alpha=8.0, **lora))
    return replace(job, config_name=None, tokenizer_name=None, model_name_or_path=str(folder / "base" / "final"))


def another_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    right = role._params
    monkeypatch.setattr(role, "_params", lambda *of: msgspec.structs.replace(right(*of), tempered_logprobs=False))


def another_row(monkeypatch: pytest.MonkeyPatch, change: Callable[[PackedRow], PackedRow]) -> None:
    right = rewarded_rows.completion_row
    monkeypatch.setattr(rewarded_rows, "completion_row", lambda *of, **more: change(right(*of, **more)))


def another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rope tells only how far tokens are from each other: what is left is how angles are rounded."""
    another_row(monkeypatch, lambda row: replace(row, positions=row.positions + 1))


def another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(row: PackedRow) -> PackedRow:
        return replace(row, of_tokens={SAMPLED: np.roll(row.of_tokens[SAMPLED], 1)})

    another_row(monkeypatch, change)


def another_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is taken for the one before it."""
    another_row(monkeypatch, lambda row: replace(row, input_ids=np.roll(row.input_ids, 1)))


@pytest.mark.parametrize("mistake", [another_temperature, another_place, another_token, another_input])
def test_a_mistake_shows(
    mistake: Callable[[pytest.MonkeyPatch], None], task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    for record in records(train(replace(job_of(task, tmp_path / "run"), max_steps=2), "pp=1")):
        difference, most, least, _, largest = mismatch(record)
        assert difference > 0 and most > 0 and least < largest


def test_another_adapter_shows_once_it_has_learned(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(policy_job(task, tmp_path / "base", max_steps=2), "pp=1")
    monkeypatch.setattr(role, "Request", lambda **of: Request(**{**of, "lora": ""}))
    first, *later = [mismatch(record) for record in records(train(adapted(task, tmp_path), "pp=1"))]
    assert first == NONE and all(one != NONE for one in later)
