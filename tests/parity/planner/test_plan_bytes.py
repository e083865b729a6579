"""The planner's bytes of weights equal those of the model that is really built, for every family and cut."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.support.models.families import FAMILIES, save_model
from tllm.comm.collectives.group import local_groups
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.schedule.limits import Limits
from tllm.model.transformer import build
from tllm.parallel.grid.grid_mesh import serving_mesh_of
from tllm.parallel.mesh import mesh_of
from tllm.planner.cost.rank_bytes import rank_bytes, state_bytes
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan


@pytest.mark.parametrize("case", ["llama", "llama_mha_tied_bias", "llama_mqa", "qwen3", "phi3", "gemma2", "olmo2"])
def test_planned_bytes_on_grids_are_held_bytes(case: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    spec = spec_from_config(json.loads((tmp_path / "config.json").read_text()))
    for text in ("tp=4,tensor=2d", "tp=8,tensor=2.5d", "tp=8,tensor=3d", "pp=2,tp=1+4,tensor=2d"):
        plan = Plan.parse(text, spec.num_layers)
        for planned in rank_bytes(spec, plan, "float32"):
            stage, place = plan.place(planned.rank)
            mesh = serving_mesh_of(spec, plan, planned.rank, local_groups(plan.stages[stage].tp)[place])
            model = build(spec, mesh, torch.float32, device="meta")
            assert planned.weights == sum(p.numel() * 4 for p in model.parameters()), (text, planned.rank)
            held_numbers = sum(math.prod(one.kv_shape) for one in model.attention_specs().values())
            assert planned.kv_per_token == 2 * 4 * held_numbers


@pytest.mark.parametrize("case", FAMILIES)
def test_planned_bytes_are_held_bytes(case: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    spec = spec_from_config(json.loads((tmp_path / "config.json").read_text()))
    for text in ("pp=1", "tp=3,shares=1:2:1", "pp=2,tp=1+2", "tp=2,experts=spread"):
        plan = Plan.parse(text, spec.num_layers)
        for planned in rank_bytes(spec, plan, "float32"):
            stage, place = plan.place(planned.rank)
            group = local_groups(plan.stages[stage].tp)[place]
            model = build(spec, mesh_of(spec, plan, planned.rank, group), torch.float32, device="meta")
            assert planned.weights == sum(p.numel() * 4 for p in model.parameters()), (text, planned.rank)
            held = build(spec, mesh_of(spec, plan, planned.rank, group), torch.bfloat16, device="meta")
            of_16_bits = rank_bytes(spec, plan, "bfloat16")[planned.rank].weights
            assert of_16_bits == sum(p.numel() * p.itemsize for p in held.parameters()), (text, planned.rank)
            held_numbers = sum(math.prod(one.kv_shape) for one in model.attention_specs().values())
            tensors = 1 if spec.latent else 2
            assert planned.kv_per_token == tensors * 4 * held_numbers
            states = sum(math.prod(shape) for state in model.state_shapes().values() for shape in state)
            assert state_bytes(spec, planned.layers, planned.cut, 2) == 4 * states
            for kind in ("int8", "fp8"):
                of_codes = rank_bytes(spec, plan, "float32", kind)[planned.rank].kv_per_token
                sizes = Limits(num_pages=1, vocab_size=9, max_model_len=9, page_size=16, kv_cache_dtype=kind)
                cache = KVCache(model.attention_specs(), sizes, torch.float32)
                assert 16 * of_codes == cache.num_bytes, (text, planned.rank)
