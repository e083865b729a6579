"""First values of an adapter: as PEFT draws them, and the same however the model is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tests.support.models.slow_load import slices
from tllm.comm.collectives.group import local_groups
from tllm.model.transformer import build
from tllm.parallel.mesh import mesh_of, whole
from tllm.parallel.shard import shard_of
from tllm.spec.plan import Plan
from tllm.training.job.lora_job import LoraJob
from tllm.training.job.target_modules import adapted_modules, adapter_parameter_count, adapter_shapes
from tllm.training.lora.initial_adapter import adapter_filler
from tllm.training.lora.trained_adapter import TrainedAdapter
from tllm.training.step.model_chunks import build_chunks


def first_values(folder: Path, lora: LoraJob, plan_text: str, seed: int = 1) -> dict[str, torch.Tensor]:
    spec = spec_of(folder)
    plan = Plan.parse(plan_text, spec.num_layers)
    named = {name: torch.full(shape, torch.nan) for name, shape in adapter_shapes(lora, spec).items()}
    fill = adapter_filler(lora, spec, seed)
    for rank in range(plan.world_size):
        at, place = plan.place(rank)
        mesh = mesh_of(spec, plan, rank, local_groups(plan.stages[at].tp)[place])
        (model,) = build_chunks(spec, mesh, plan.runs, torch.float32, "meta")
        own = TrainedAdapter(model, adapted_modules(lora, spec), torch.float32)
        fill(own)
        for parameter in own.parameters():
            for piece in shard_of(parameter).pieces:
                named[piece.name][slices(piece.source)] = parameter.detach()[slices(piece.target)]
    return named


@pytest.mark.parametrize("case", ["llama", "qwen3_next_moe"])
def test_values_hang_on_names_and_the_seed_alone(case: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    lora = LoraJob(r=4)
    one = first_values(tmp_path, lora, "pp=1")
    for plan in ("tp=2", "pp=2,tp=1+2"):
        other = first_values(tmp_path, lora, plan)
        assert all(torch.equal(one[name], other[name]) for name in one)
    unlike = first_values(tmp_path, lora, "pp=1", seed=2)
    assert all(torch.equal(one[name], unlike[name]) == (".lora_B." in name) for name in one)


@pytest.mark.parametrize("case", ["llama", "qwen3_next_moe"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_has_as_many_parameters_as_are_counted(case: str, use_dora: bool, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    spec, lora = spec_of(tmp_path), LoraJob(r=4, use_dora=use_dora)
    adapter = TrainedAdapter(
        build(spec, whole(spec), torch.float32, "meta"), adapted_modules(lora, spec), torch.float32
    )
    assert adapter_parameter_count(lora, spec) == sum(parameter.numel() for parameter in adapter.parameters())


@pytest.mark.parametrize("how", [True, "gaussian"])
def test_a_is_spread_as_peft_spreads_it_and_b_is_nothing(how: bool | str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    drawn = first_values(tmp_path, LoraJob(r=64, init_lora_weights=how), "pp=1")
    for name, values in drawn.items():
        if ".lora_B." in name:
            assert not values.any()
            continue
        inputs = values.shape[1]
        if how == "gaussian":
            assert abs(float(values.std()) * 64 - 1) < 0.08
        else:
            assert float(values.abs().max()) <= inputs**-0.5 < 1.02 * float(values.abs().max())
            assert abs(float(values.std()) * (3 * inputs) ** 0.5 - 1) < 0.08
