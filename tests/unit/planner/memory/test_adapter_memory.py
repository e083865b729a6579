"""What training an adapter takes: the weights of the model beside it and nothing more of it; and its own state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tllm.comm.collectives.group import local_groups
from tllm.parallel.mesh import mesh_of
from tllm.planner.cost.buckets import padded_elements
from tllm.planner.cost.flops import training_flops
from tllm.planner.cost.rank_work import rank_works
from tllm.planner.memory.training_memory import training_bytes
from tllm.spec.plan import Plan
from tllm.training.job.job import Job
from tllm.training.job.job_parts import training_facts
from tllm.training.job.lora_job import LoraJob
from tllm.training.job.target_modules import adapted_modules
from tllm.training.lora.trained_adapter import TrainedAdapter
from tllm.training.step.model_chunks import build_chunks

CASES = {
    "llama": ("all-linear",),
    "llama_mha_tied_bias": ("q_proj", "down_proj"),
    "phi3": ("all-linear",),
    "qwen2_moe": ("all-linear",),
    "deepseek_v3_moe": ("all-linear",),
    "qwen3_next_moe": ("all-linear",),
    "qwen3_5": ("all-linear",),
    "gemma4_moe": ("all-linear",),
    "mixtral": ("w1", "w2", "w3"),
    "deepseek_v2_moe": ("kv_b_proj", "down_proj"),
}


DORA = ("phi3", "qwen3_next_moe")


def job_of(lora: LoraJob | None, **more: Any) -> Job:
    return Job(output_dir="run", train_files=("a",), max_steps=1, model_name_or_path="m", lora=lora, **more)


@pytest.mark.parametrize("plan_text", ["pp=1", "pp=2", "tp=2", "tp=2,experts=spread"])
@pytest.mark.parametrize("case", CASES)
def test_an_adapter_has_as_many_numbers_as_are_counted(case: str, plan_text: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    left_out: Any = dict(exclude_modules=("o_proj",), layers_to_transform=(0, 3)) if case in DORA else {}
    spec, lora = spec_of(tmp_path), LoraJob(r=3, target_modules=CASES[case], use_dora=case in DORA, **left_out)
    plan = Plan.parse(plan_text, spec.num_layers)
    for work in rank_works(spec, plan, training_facts(job_of(lora))):
        _, place = plan.place(work.rank)
        mesh = mesh_of(spec, plan, work.rank, local_groups(work.tp)[place])
        (model,) = build_chunks(spec, mesh, plan.runs, torch.float32, "meta")
        held = TrainedAdapter(model, adapted_modules(lora, spec), torch.float32)
        counted = sum(parameter.elements for unit in work.learned(spec) for parameter in unit)
        assert counted == sum(parameter.numel() for parameter in held.parameters())


def test_the_model_beside_an_adapter_has_no_state(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    spec = spec_of(tmp_path)
    plan = Plan.parse("dp=2", spec.num_layers)
    (full, _), (adapter, _), (few_bits, _) = (
        training_bytes(spec, plan, training_facts(job_of(lora)))
        for lora in (None, LoraJob(r=2), LoraJob(r=2, quantize="int4"))
    )
    (work, _) = rank_works(spec, plan, training_facts(job_of(LoraJob(r=2))))
    learned = sum(padded_elements(parameter) for unit in work.learned(spec) for parameter in unit)
    whole = sum(parameter.elements for unit in work.parameters(spec) for parameter in unit)
    assert adapter.gradients == 4 * learned and adapter.optimizer == 8 * learned
    assert adapter.weights == 4 * (whole + learned)
    assert full.optimizer >= 8 * whole > 5 * adapter.optimizer and full.saving > 5 * adapter.saving
    assert few_bits.weights < 0.5 * adapter.weights and few_bits.optimizer == adapter.optimizer


def test_adapters_of_16_bit_models_are_in_float32(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    spec = spec_of(tmp_path)
    plan, facts = Plan.parse("pp=1", spec.num_layers), training_facts(job_of(LoraJob(r=2), dtype="bfloat16"))
    (rank,) = training_bytes(spec, plan, facts)
    (work,) = rank_works(spec, plan, facts)
    whole = sum(parameter.elements for unit in work.parameters(spec) for parameter in unit)
    learned = sum(padded_elements(parameter) for unit in work.learned(spec) for parameter in unit)
    assert rank.wide_weights == 0 and rank.weights == 2 * whole + 4 * learned


def test_a_frozen_model_takes_two_thirds_of_the_products(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    spec = spec_of(tmp_path)
    part = training_flops(spec, [1], is_frozen=True) / training_flops(spec, [1])
    assert 2 / 3 < part < 0.67
