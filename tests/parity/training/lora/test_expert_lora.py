"""Adapters of experts: gradients of PEFT, which stacks those of a layer, every cut against one process, and serving."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from tests.parity.engine.lora.test_lora import engine_with, peft_scores, scores, together
from tests.parity.training.lora.test_lora import (
    TOKENS,
    Named,
    adapter,
    lora_job,
    our_gradients,
    peft_gradients,
    trained_scores,
)
from tests.parity.training.lora.test_quantized_lora import gradients, plain_product
from tests.support.models.adapters import peft_adapter, save_adapter
from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tests.support.models.reference_gradients import apart, in_float64
from tests.support.selection import soak_but
from tests.support.training.runs import records, train
from tests.support.training.training_step import furthest
from tllm.core.errors import ConfigError, WeightsError
from tllm.engine.compute.adapted_rows import AdaptedRows, _Group
from tllm.model.transformer import build
from tllm.parallel.experts import ExpertSum
from tllm.parallel.lora.adapted_model import module_shapes
from tllm.parallel.mesh import whole
from tllm.parallel.quantized_weight import WeightParts
from tllm.training.job.lora_job import LoraJob
from tllm.training.lora.merged_model import write_merged
from tllm.weights.byte_source import LocalFiles
from tllm.weights.lora.held_adapter import HeldAdapter
from tllm.weights.lora.stacked_experts import stacked, taken_apart

pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
"""PEFT says so of patterns that it makes itself for experts that it stacks, and uses them."""

PARTS = {
    "mixtral": ("w1", "w3", "w2"),
    "minimax_m2_moe": ("w1", "w3", "w2"),
    "qwen3_moe": ("gate_proj", "up_proj", "down_proj"),
    "glm4_moe": ("gate_proj", "up_proj", "down_proj"),
    "deepseek_v3_moe": ("gate_proj", "up_proj", "down_proj"),
}
"""What the gate, the up and the down of an expert are called."""

RANK = 4
EXPERTS = LoraJob(r=RANK, lora_alpha=8.0, target_modules=("w1", "w2", "w3", "q_proj"))


def adapted(case: str, folder: Path) -> tuple[Path, PeftModel]:
    """A model and a random adapter of all its experts; the same by PEFT, whose model has those of a layer stacked."""
    truth = save_model(case, folder / "base")
    ends = [f"experts.{expert}.{part}" for expert in range(8) for part in PARTS[case]]
    save_adapter(folder / "base", folder / "adapter", rank=RANK, ends=ends, target_modules=list(PARTS[case]))
    return folder / "base", PeftModel.from_pretrained(truth, str(folder / "adapter"), is_trainable=True).eval()


def of_each_expert(stacked: Named, case: str) -> Named:
    """PEFT's tensors of a layer's experts under the names of each expert.

    It has A of all experts one after another, and in B the experts of each row of A side by side. Gate and up are one,
    with a rank for each, and B is 0 where the rows of the one meet the columns of the other.
    """
    found: Named = {}
    gate, up, down = PARTS[case]
    block = "block_sparse_moe" if case in ("mixtral", "minimax_m2_moe") else "mlp"
    for name, x in stacked.items():
        layer, _, kind = name.rpartition(".mlp.experts.")
        is_A, both = "lora_A" in kind, kind.startswith("base_layer")
        rank = 2 * RANK if both else RANK
        of_experts = x.unflatten(0, (-1, rank)) if is_A else x.unflatten(1, (rank, -1)).permute(2, 0, 1)
        for expert, own in enumerate(of_experts):
            halves = own.chunk(2) if both else (own,)
            for place, (part, half) in enumerate(zip((gate, up) if both else (down,), halves, strict=True)):
                mine = half if is_A or not both else half[:, place * RANK : (place + 1) * RANK]
                found[f"{layer}.{block}.experts.{expert}.{part}.{kind.removeprefix('base_layer.')}"] = mine
    return found


def joined(named: Named) -> Named:
    """Those of a layer's experts one after another: of an expert with few rows a gradient is hardly more than noise."""
    found: dict[str, list[Tensor]] = {}
    for name in sorted(named):
        found.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(named[name].flatten())
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.parametrize("case", PARTS)
def test_gradients_are_those_of_peft(case: str, tmp_path: Path) -> None:
    base, peft = adapted(case, tmp_path)
    _, in_32_of_peft = peft_gradients(peft, TOKENS)
    with in_float64(peft):
        loss, stacked = peft_gradients(peft, TOKENS)
    want = of_each_expert(stacked, case)
    assert max(float(gradient.norm()) for gradient in want.values()) > 1e-2
    got_loss, got = our_gradients(base, tmp_path / "adapter", torch.float64)
    assert abs(got_loss - loss) < 1e-10 * loss
    for name, distance in apart(got, want).items():
        assert distance < 1e-10, f"{name}: {distance:.1e}"
    _, in_32 = our_gradients(base, tmp_path / "adapter", torch.float32)
    of_peft = apart(joined(of_each_expert(in_32_of_peft, case)), joined(want))
    for name, distance in apart(joined(in_32), joined(want)).items():
        assert distance < max(1e-6, 3 * of_peft[name]), f"{name}: {distance:.1e} and PEFT's {of_peft[name]:.1e}"


@pytest.mark.parametrize(
    ("case", "plan"),
    soak_but(
        [("glm4_moe", "tp=3,shares=1:2:1")],
        [(c, p) for c in PARTS for p in ("pp=1", "tp=3,shares=1:2:1", "tp=2,experts=spread")],
    ),
)
def test_an_adapter_is_served_as_peft_computes_it_and_merged(case: str, plan: str, tmp_path: Path) -> None:
    base, peft = adapted(case, tmp_path)
    with torch.no_grad(), in_float64(peft):
        want = peft_scores(peft)
    with engine_with(base, [tmp_path / "adapter"], plan, dtype="float64") as (engine, (lora,)):
        assert (scores(engine, "") - want).abs().max() > 0.1, "an adapter that does nothing would hide a fault"
        torch.testing.assert_close(scores(engine, lora), want, rtol=0, atol=1e-10)
    write_merged(base, tmp_path / "merged", [tmp_path / "adapter"], "float64")
    with engine_with(tmp_path / "merged", [], dtype="float64") as (engine, _):
        torch.testing.assert_close(scores(engine, ""), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("mixtral", ("gate_up_proj", "down_proj")),
        ("qwen2_moe", ("gate_up_proj", "down_proj")),
        ("qwen3_moe", ("gate_up_proj",)),
        ("glm4_moe", ("down_proj",)),
        ("gpt_oss_moe", ("gate_up_proj", "down_proj")),
    ],
)
def test_what_peft_has_stacked_is_served_and_merged(case: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    """Of PEFT's `target_parameters`, beside an adapter of linears, under plans that cut or spread the experts."""
    truth = save_model(case, tmp_path / "base")
    wanted = [f"mlp.experts.{part}" for part in parts]
    peft = peft_adapter(truth, tmp_path / "adapter", ["q_proj", "o_proj"], target_parameters=wanted, use_rslora=True)
    with torch.no_grad(), in_float64(peft):
        want = peft_scores(peft)
    for plan in ("tp=3,shares=1:2:1", "tp=2,experts=spread"):
        with engine_with(tmp_path / "base", [tmp_path / "adapter"], plan, dtype="float64") as (engine, (lora,)):
            torch.testing.assert_close(scores(engine, lora), want, rtol=0, atol=1e-10)
            assert (scores(engine, "") - want).abs().max() > 0.1
    write_merged(tmp_path / "base", tmp_path / "merged", [tmp_path / "adapter"], "float64")
    with engine_with(tmp_path / "merged", [], dtype="float64") as (engine, _):
        torch.testing.assert_close(scores(engine, ""), want, rtol=0, atol=1e-10)


@dataclass(frozen=True)
class Given:
    """A tensor that is there, as it is written."""

    name: str
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def make(self) -> Tensor:
        return self.tensor


def test_gradients_beside_experts_of_one_tensor_are_those_of_peft(tmp_path: Path) -> None:
    """gpt_oss, whose files have a layer's experts in one tensor, with gate and up by turns and biases."""
    truth = save_model("gpt_oss_moe", tmp_path / "base")
    wanted = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    peft = peft_adapter(truth, tmp_path / "adapter", ["o_proj"], target_parameters=wanted)
    with in_float64(peft):
        loss, stacks = peft_gradients(peft, TOKENS)
    spec = spec_of(tmp_path / "base")
    files = taken_apart(
        LocalFiles(tmp_path / "adapter"), module_shapes(build(spec, whole(spec), torch.float32, "meta"))
    )
    assert files is not None
    (tmp_path / "apart").mkdir()
    for name, content in files.items():
        (tmp_path / "apart" / name).write_bytes(content)
    got_loss, got = our_gradients(tmp_path / "base", tmp_path / "apart", torch.float64)
    assert abs(got_loss - loss) < 1e-10 * loss
    again = {tensor.name: tensor.make() for tensor in stacked([Given(name, x) for name, x in got.items()], 2)[0]}
    assert max(float(x.norm()) for x in stacks.values()) > 1e-2
    for name, distance in apart(again, stacks).items():
        assert distance < 1e-10, f"{name}: {distance:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_rows_of_many_adapters_meet_in_one_expert(quantize: str | None, tmp_path: Path) -> None:
    """Rows of two adapters and of none, in one batch: as each alone."""
    save_model("mixtral", tmp_path / "base", hidden_size=64, intermediate_size=96)
    made = [save_adapter(tmp_path / "base", tmp_path / f"adapter-{seed}", seed, rank=2 + seed) for seed in range(2)]
    with engine_with(tmp_path / "base", made, "tp=2", quantize=quantize) as (engine, ids):
        loras = ["", *ids, ids[0]]
        mixed = together(engine, loras)
        single = [together(engine, [lora] * (place + 1))[place] for place, lora in enumerate(loras)]
    assert [[token for token, _ in reply] for reply in mixed] == [[token for token, _ in reply] for reply in single]
    if quantize is not None:
        assert mixed == single
    assert len({tuple(token for token, _ in reply) for reply in mixed}) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["mixtral", "gpt_oss_moe"])
def test_rows_beside_an_adapter_of_other_linears_have_the_same_bits(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Experts to which nothing is added make of each row what they make of it without any adapter in its batch."""
    save_model(case, tmp_path / "base")
    spec = spec_of(tmp_path / "base")
    model = build(spec, whole(spec), dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        layers = [module for module in model.modules() if isinstance(module, ExpertSum)]
        for experts in layers:
            x_TD = torch.randn(40, experts.products()[1].shape[2 if case == "gpt_oss_moe" else 1]).to(dtype)
            experts_TK = torch.rand(40, experts.count).argsort(1)[:, :2]
            weights_TK = torch.rand(40, 2).to(dtype)
            alone_TD = experts(x_TD, weights_TK, experts_TK)
            beside_TD = experts(x_TD, weights_TK, experts_TK, AdaptedRows([_Group({}, torch.arange(7))]))
            assert torch.equal(alone_TD, beside_TD)
    assert layers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("mixtral", folder)
    return folder


@pytest.fixture(scope="module")
def golden(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Losses and folder of the run on one rank."""
    run = tmp_path_factory.mktemp("golden") / "run"
    return [record.loss for record in records(train(lora_job(model, run, lora=EXPERTS, max_steps=3), "pp=1"))], run


PLANS = (
    "dp=2,tp=2,ep=2,zero=1",
    "tp=3,shares=1:2:1",
    "dp=2,ep=2",
    "tp=2,experts=spread,sequence=true",
    "dp=2,pp=2,zero=2,schedule=zero_bubble",
    "tp=2,recompute=layer",
)


@pytest.mark.slow
@pytest.mark.parametrize("plan", soak_but(PLANS[:2], PLANS))
def test_every_plan_is_the_run_of_one_process(
    plan: str, model: Path, golden: tuple[list[float], Path], tmp_path: Path
) -> None:
    """Experts that are spread over replicas or over tensor-parallel ranks, and those that are cut."""
    got = records(train(lora_job(model, tmp_path / "run", lora=EXPERTS, max_steps=3), plan))
    assert all(abs(a.loss - b) < 1e-12 * b for a, b in zip(got, golden[0], strict=True))
    off, name = furthest(adapter(tmp_path / "run"), adapter(golden[1]))
    assert off < 1e-11, name


@pytest.mark.slow
def test_a_run_beside_experts_of_one_tensor_is_saved_as_peft_stacks_them(tmp_path: Path) -> None:
    base, lora = tmp_path / "base", LoraJob(r=RANK, target_modules=("gate_up_proj", "down_proj", "q_proj"))
    truth = save_model("gpt_oss_moe", base)
    want = records(train(lora_job(base, tmp_path / "one", lora=lora, max_steps=2), "pp=1"))
    for number, plan in enumerate(("tp=3,shares=1:2:1", "dp=2,tp=2,ep=2,zero=1")):
        got = records(train(lora_job(base, tmp_path / f"run{number}", lora=lora, max_steps=2), plan))
        assert all(abs(a.loss - b.loss) < 1e-12 * b.loss for a, b in zip(got, want, strict=True))
        off, name = furthest(adapter(tmp_path / f"run{number}"), adapter(tmp_path / "one"))
        assert off < 1e-11, name
    final = tmp_path / "one" / "final"
    bare = peft_scores(truth)
    of_peft = peft_scores(PeftModel.from_pretrained(truth, str(final)).eval())
    assert (of_peft - bare).abs().max() > 0.02
    with engine_with(base, [final], "tp=2") as (engine, (lora_id,)):
        torch.testing.assert_close(scores(engine, lora_id), of_peft, rtol=0, atol=2e-5)


def test_peft_reads_a_finished_run(model: Path, golden: tuple[list[float], Path]) -> None:
    final = golden[1] / "final"
    tensors = load_file(final / "adapter_model.safetensors")
    assert len(tensors) == 4 * (5 * 3 + 1) * 2
    assert all(x.abs().max() > 0 for x in tensors.values()), "every B has learned"
    truth = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    bare = peft_scores(truth)
    want = peft_scores(PeftModel.from_pretrained(truth, str(final)).eval())
    assert (want - bare).abs().max() > 0.02
    torch.testing.assert_close(trained_scores(model, final), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("case", "targets"), [("mixtral", ("w1", "w2", "w3")), ("gpt_oss_moe", ("gate_up_proj", "down_proj"))]
)
def test_beside_few_bits_gradients_are_by_the_numbers_that_weights_stand_for(
    case: str, targets: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed products round their inputs to 8 bits, which is left out here."""
    save_model(case, tmp_path)
    lora = LoraJob(r=RANK, target_modules=targets, quantize="int8")
    loss, want = gradients(tmp_path, "float64", lora)
    monkeypatch.setattr(WeightParts, "product", plain_product)
    exact_loss, exact = gradients(tmp_path, "float32", lora)
    assert abs(exact_loss - loss) / loss < 1e-6
    assert max(float(x.norm()) for x in want.values()) > 1e-3
    for name, distance in apart(exact, want).items():
        assert distance < 2e-5, f"{name}: {distance:.1e}"


def test_beside_a_router_whose_correction_is_float32_an_adapter_is_trained_in_bfloat16(tmp_path: Path) -> None:
    """What is not trained keeps its own dtype: the steps are those of float32 but for the rounding of products."""
    save_model("glm4_moe", tmp_path / "base")
    lora, losses = LoraJob(r=RANK, lora_alpha=8.0), dict[str, list[float]]()
    for dtype in ("float32", "bfloat16"):
        job = lora_job(tmp_path / "base", tmp_path / dtype, lora=lora, dtype=dtype, max_steps=3)
        losses[dtype] = [record.loss for record in records(train(job, "pp=1"))]
    assert all(abs(a - b) < 0.02 * b for a, b in zip(losses["bfloat16"], losses["float32"], strict=True))


def test_what_cannot_be_computed_is_refused(model: Path, tmp_path: Path) -> None:
    def tried(**keys: Any) -> Any:
        lora = LoraJob(**{"r": 2, "target_modules": ("w2",), **keys})
        return train(lora_job(model, tmp_path / "run", lora=lora, max_steps=1), "pp=1")

    with pytest.raises(ConfigError, match=r"use_dora and .*experts\.0\.w2, of an expert: PEFT, .* has no DoRA"):
        tried(use_dora=True)
    with pytest.raises(
        ConfigError, match=r"lora_dropout is 0\.1 and .*experts\.0\.w2 is adapted, an expert's: PEFT, .* drops nothing"
    ):
        tried(lora_dropout=0.1)
    with pytest.raises(ConfigError, match=r"experts\.3\.w2 and not every expert of its layer alike"):
        tried(target_modules=("experts.3.w2",))


def test_an_adapter_of_some_experts_is_refused(model: Path, tmp_path: Path) -> None:
    folder = save_adapter(model, tmp_path / "some", ends=["experts.0.w1", "experts.2.w1"])
    shapes = {f"model.layers.{n}.block_sparse_moe.experts.{e}.w1": (56, 48) for n in range(4) for e in range(5)}
    with pytest.raises(WeightsError, match=r"experts\.[02]\.w1 and not every expert of its layer alike"):
        HeldAdapter.read("some", folder, shapes, 16)
