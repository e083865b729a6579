"""Adapters of `kv_b_proj`, which attention over latents takes apart: as PEFT, which multiplies latents by it whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel

from tests.parity.engine.test_lora import engine_with, peft_scores, scores
from tests.parity.training.lora.test_lora import (
    adapter,
    gradients_of_peft,
    lora_job,
    trained_scores,
)
from tests.support.models.adapters import peft_adapter, save_adapter
from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tests.support.models.reference_gradients import in_float64
from tests.support.selection import soak_but
from tests.support.training.runs import records, train
from tests.support.training.training_step import furthest
from tllm.core.errors import ConfigError, PlanError
from tllm.spec.plan import Plan
from tllm.training.job.combinations import check_combination
from tllm.training.job.lora_job import LoraJob
from tllm.training.lora.merged_model import write_merged

TARGETS = {"deepseek_v3_moe": ("q_b_proj", "kv_b_proj", "o_proj"), "deepseek_v2_moe": ("q_proj", "kv_b_proj")}
LATENT = LoraJob(r=4, lora_alpha=8.0, target_modules=("kv_b_proj", "q_a_proj", "gate_proj"))


@pytest.mark.parametrize("case", TARGETS)
def test_gradients_are_those_of_peft(case: str, tmp_path: Path) -> None:
    truth = save_model(case, tmp_path / "base")
    peft = peft_adapter(truth, tmp_path / "adapter", TARGETS[case], use_rslora=True, rank_pattern={"kv_b_proj": 6})
    want = gradients_of_peft(peft, tmp_path)
    assert min(float(gradient.norm()) for name, gradient in want.items() if "kv_b_proj" in name) > 1e-3


@pytest.mark.parametrize("plan", soak_but(["tp=3,shares=1:2:1"], ["pp=1", "pp=2,tp=1+2", "tp=3,shares=1:2:1"]))
@pytest.mark.parametrize("case", TARGETS)
def test_an_adapter_is_served_beside_the_cache_of_latents_and_merged(case: str, plan: str, tmp_path: Path) -> None:
    truth = save_model(case, tmp_path / "base")
    bare = peft_scores(truth)
    peft = peft_adapter(truth, tmp_path / "adapter", ["kv_b_proj"])
    with torch.no_grad(), in_float64(peft):
        want = peft_scores(peft)
    assert (want - bare).abs().max() > 0.1, "an adapter that does nothing would hide a fault"
    with engine_with(tmp_path / "base", [tmp_path / "adapter"], plan, dtype="float64") as (engine, (lora,)):
        torch.testing.assert_close(scores(engine, lora), want, rtol=0, atol=1e-10)
    with engine_with(tmp_path / "base", [tmp_path / "adapter"], plan) as (engine, (lora,)):
        torch.testing.assert_close(scores(engine, lora), want, rtol=0, atol=2e-5)
    write_merged(tmp_path / "base", tmp_path / "merged", [tmp_path / "adapter"], "float64")
    with engine_with(tmp_path / "merged", [], dtype="float64") as (engine, _):
        torch.testing.assert_close(scores(engine, ""), want, rtol=0, atol=1e-10)


def test_beside_few_bits_a_row_has_the_same_bits_whatever_is_beside_it(tmp_path: Path) -> None:
    save_model("deepseek_v3_moe", tmp_path / "base")
    made = save_adapter(tmp_path / "base", tmp_path / "adapter", ends=["kv_b_proj"])
    with engine_with(tmp_path / "base", [made], quantize="int4", enable_prefix_caching=False) as (engine, (lora,)):
        found = [scores(engine, lora, tuple(range(1, 1 + count))) for count in (12, 20)]
        assert (found[0] - scores(engine, "", tuple(range(1, 13)))).abs().max() > 0.05
    torch.testing.assert_close(found[0], found[1][:11], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("deepseek_v3_moe", folder)
    return folder


@pytest.fixture(scope="module")
def golden(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Losses and folder of the run on one rank."""
    run = tmp_path_factory.mktemp("golden") / "run"
    return [record.loss for record in records(train(lora_job(model, run, lora=LATENT, max_steps=3), "pp=1"))], run


PLANS = ("tp=3,shares=1:2:1", "dp=2,pp=2,zero=2", "tp=2,sequence=true,recompute=layer", "cp=2,recompute=selective")


@pytest.mark.slow
@pytest.mark.parametrize("plan", soak_but(PLANS[:1], PLANS))
def test_every_plan_is_the_run_of_one_process(
    plan: str, model: Path, golden: tuple[list[float], Path], tmp_path: Path
) -> None:
    got = records(train(lora_job(model, tmp_path / "run", lora=LATENT, max_steps=3), plan))
    assert all(abs(a.loss - b) < 1e-12 * b for a, b in zip(got, golden[0], strict=True))
    off, name = furthest(adapter(tmp_path / "run"), adapter(golden[1]))
    assert off < 1e-11, name


def test_a_finished_run_has_the_trainer_s_own_numbers(model: Path, golden: tuple[list[float], Path]) -> None:
    final = golden[1] / "final"
    assert sum("kv_b_proj" in name for name in adapter(golden[1])) == 4 * 2
    with engine_with(model, [final], "tp=2") as (engine, (lora,)):
        served, bare = scores(engine, lora), scores(engine, "")
    assert (served - bare).abs().max() > 0.01
    torch.testing.assert_close(trained_scores(model, final), served, rtol=0, atol=2e-5)


def test_peft_reads_it(model: Path, tmp_path: Path) -> None:
    lora = LoraJob(r=4, lora_alpha=8.0, target_modules=("kv_b_proj",))
    train(lora_job(model, tmp_path / "run", lora=lora, max_steps=2), "pp=1")
    truth = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    want = peft_scores(PeftModel.from_pretrained(truth, str(tmp_path / "run" / "final")).eval())
    torch.testing.assert_close(trained_scores(model, tmp_path / "run" / "final"), want, rtol=0, atol=2e-5)


def test_what_cannot_be_computed_is_refused(model: Path, tmp_path: Path) -> None:
    def tried(**keys: Any) -> Any:
        lora = LoraJob(**{"r": 2, "target_modules": ("kv_b_proj",), **keys})
        return train(lora_job(model, tmp_path / "run", lora=lora, max_steps=1), "pp=1")

    with pytest.raises(ConfigError, match=r"use_dora and .*kv_b_proj, which is computed of linears"):
        tried(use_dora=True)
    with pytest.raises(ConfigError, match=r"lora_dropout is 0\.1 and .*kv_b_proj is adapted"):
        tried(lora_dropout=0.1)
    job, spec = lora_job(model, tmp_path / "run", lora=LATENT), spec_of(model)
    with pytest.raises(PlanError, match=r"zero_bubble, .* whose A and B are used twice"):
        check_combination(job, Plan.parse("pp=2,schedule=zero_bubble", spec.num_layers), spec)
