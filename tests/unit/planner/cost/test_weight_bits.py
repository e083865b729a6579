"""The bytes of quantised weights follow from the linears that a model is really built of."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.models.families import FAMILIES, save_model
from tests.support.models.layouts import spec_of
from tllm.comm.collectives.group import local_groups
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import mesh_of
from tllm.parallel.shard import shard_of
from tllm.planner.cluster.device import Cluster, Device
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.cost.stage_team import StageTeam
from tllm.planner.cost.weight_bits import linears, mean_linear_bytes, shared_linears
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.quantized.weight_bits import EMBEDDING, HEAD, LAYERS, Coding, Quantization

ROUTERS = (".mlp.gate", ".mlp.router", ".block_sparse_moe.gate", ".shared_expert_gate", ".router.proj")


def of_model(model: Transformer) -> Counter[str]:
    """Elements of each linear of the layers, those of all experts with the first."""
    found = Counter[str]()
    for parameter in model.parameters():
        if shard_of(parameter).plain:
            continue
        for piece in shard_of(parameter).matrices or shard_of(parameter).pieces:
            module = piece.name.removesuffix(".weight")
            if "layers" in module and len(piece.source) == 2 and not module.endswith(ROUTERS):
                first, _, rest = module.partition(".experts.")
                module = f"{first}.experts.0.{rest.partition('.')[2]}" if rest else module
                found[module] += math.prod(stop - start for start, stop in piece.source)
    return found


@pytest.mark.parametrize("case", FAMILIES)
def test_the_linears_are_those_of_the_model(case: str, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    spec = spec_of(tmp_path)
    for text in ("pp=1", "tp=3,shares=1:2:1", "pp=2,tp=1+2", "tp=2,experts=spread"):
        plan = Plan.parse(text, spec.num_layers)
        for planned in rank_bytes(spec, plan, "float32"):
            stage, place = plan.place(planned.rank)
            group = local_groups(plan.stages[stage].tp)[place]
            model = build(spec, mesh_of(spec, plan, planned.rank, group), torch.float32, device="meta")
            counted = Counter[str]()
            for number in planned.layers:
                for linear in linears(spec, number, planned.cut):
                    counted[linear.module] += linear.elements
            counted.update({one.module: one.elements for one in shared_linears(spec, planned.layers, planned.cut)})
            assert counted == of_model(model), (text, planned.rank)


def rounded(bits: int, tied: bool) -> Quantization:
    """Layers in groups of 32, and the table of the logits in 8 bits."""
    return Quantization(f"int{bits}", ((EMBEDDING if tied else HEAD, Coding(8, 32)), (LAYERS, Coding(bits, 32))))


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    save_model("llama", tmp_path)
    return spec_of(tmp_path)


def test_each_module_counts_by_its_own_bits(spec: ModelSpec) -> None:
    wide = Quantization("gptq", ((r".*\.o_proj", None), (r".*\.1\..*", Coding(8, 16)), (LAYERS, Coding(4, 16))))
    (plain,) = rank_bytes(spec, Plan.parse("pp=1", 4), "float32")
    (held,) = rank_bytes(replace(spec, quantization=wide), Plan.parse("pp=1", 4), "float32")
    every = [linear for number in range(4) for linear in linears(spec, number, plain.cut)]
    saved = sum(x.elements * (4 - (9 if ".1." in x.module else 5) / 8) for x in every if "o_proj" not in x.module)
    assert held.weights == plain.weights - saved


def test_a_scale_for_a_whole_row_is_held_by_every_rank(spec: ModelSpec) -> None:
    rows = replace(spec, quantization=Quantization("fp8", ((LAYERS, Coding(8)),)))
    (one,) = rank_bytes(rows, Plan.parse("pp=1", 4), "bfloat16")
    two = rank_bytes(rows, Plan.parse("tp=2", 4), "bfloat16")
    norms = 2 * (4 * 2 + 1) * 48
    assert sum(rank.weights for rank in two) == one.weights + norms + 4 * (2 * 48 * 2), "o and down: two bytes a row"


def test_the_output_head_and_a_tied_table(spec: ModelSpec) -> None:
    plan, table = Plan.parse("pp=1", 4), spec.vocab_size * spec.hidden_size
    for tied, held in ((False, table * (4 + 8.5 / 8)), (True, table * 8.5 / 8)):
        one = replace(spec, tied=tied)
        (plain,) = rank_bytes(one, plan, "float32")
        (layers,) = rank_bytes(
            replace(one, quantization=Quantization("x", ((LAYERS, Coding(8, 32)),))), plan, "float32"
        )
        (all_of_it,) = rank_bytes(replace(one, quantization=rounded(8, tied)), plan, "float32")
        assert plain.weights > layers.weights > all_of_it.weights
        whole = table * 4 * (1 if tied else 2)
        assert abs(layers.weights - all_of_it.weights - (whole - held)) <= 1


def test_a_team_holds_and_reads_fewer_bytes(spec: ModelSpec) -> None:
    device = Device(2**30, (("bfloat16", ((1, 1e12),)),), 1e9)
    cluster = Cluster(("a",), (device,), (0,), (None,))
    facts, plan = ServingFacts("bfloat16", 64, 16), Plan.parse("pp=1", 4)
    quantized = replace(spec, quantization=rounded(4, spec.tied))
    plain, small = (StageTeam(one, cluster, [0], cut_stage(one, (1,)), facts) for one in (spec, quantized))
    whole = range(4)
    assert small.memory(whole)[0].weights == pytest.approx(rank_bytes(quantized, plan, "bfloat16")[0].weights, abs=1)
    assert mean_linear_bytes(quantized, 2) == pytest.approx(4.5 / 8)
    assert small.memory(whole)[0].total < plain.memory(whole)[0].total
    asked = StageTeam(quantized, cluster, [0], cut_stage(quantized, (1,)), replace(facts, weight_bits=16))
    assert asked.memory(whole) == plain.memory(whole), "the bits that are asked for count"
