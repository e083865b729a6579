"""QLoRA: adapters beside weights in few bits, whose gradients are those of the numbers that the weights stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parity.engine.lora.test_lora import engine_with, scores
from tests.parity.training.lora.test_lora import TOKENS, adapter, lora_job, trained_scores
from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tests.support.models.reference_gradients import apart
from tests.support.selection import soak_but
from tests.support.training.runs import job_for, records, train
from tests.support.training.training_step import furthest
from tllm.model.transformer import build
from tllm.parallel import quantized_weight
from tllm.parallel.mesh import whole
from tllm.parallel.quantized_weight import PackedRows, QuantizedStack, QuantizedWeight, WeightParts, is_empty
from tllm.parallel.shard import shard_of
from tllm.quantization.blocks import dequantize
from tllm.quantization.packed_layout import pack, unpack_rows
from tllm.quantization.round_weights import round_weights
from tllm.spec.hf_config import read_config
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.job.lora_job import LoraJob
from tllm.training.job.target_modules import adapted_modules
from tllm.training.lora.initial_adapter import adapter_filler
from tllm.training.lora.trained_adapter import TrainedAdapter
from tllm.training.objectives.next_token import NextTokenLoss
from tllm.training.state.initial_weights import InitialWeights
from tllm.weights.byte_source import LocalFiles

Named = dict[str, Tensor]


def packed_rows(outputs: int, columns: int, kind: Any = "int4", seed: int = 0) -> tuple[PackedRows, Tensor]:
    """Random packed weights, and the numbers that they stand for."""
    draw = torch.Generator().manual_seed(seed)
    blocks = round_weights(torch.randn(outputs, columns, generator=draw), kind)
    return PackedRows(pack(blocks), blocks.scheme, outputs, columns), dequantize(blocks)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_gradient_of_a_product_is_by_the_numbers_that_weights_stand_for(
    kind: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of packed and of plain outputs, some of them at a time, whose input does not fill its last group of columns."""
    monkeypatch.setattr(quantized_weight, "PLAIN_AT_ONCE", 16 * 90)
    (first, plain_first), (second, plain_second) = packed_rows(40, 90, kind), packed_rows(17, 90, kind, seed=1)
    beside = torch.randn(5, 90)
    weight = QuantizedWeight([first, beside, second], 90)
    x_TD = torch.randn(7, 90, requires_grad=True)
    y_TF = weight.matmul(x_TD, exact)
    assert y_TF.dtype == (torch.float64 if exact else torch.float32)
    gradient_TF = torch.randn_like(y_TF)
    y_TF.backward(gradient_TF)
    want = gradient_TF.double() @ torch.cat((plain_first, beside, plain_second)).double()
    assert x_TD.grad is not None and x_TD.grad.dtype == torch.float32
    torch.testing.assert_close(x_TD.grad.double(), want, rtol=1e-6, atol=2e-5)
    with torch.no_grad():
        assert torch.equal(weight.matmul(x_TD, exact), y_TF), "a gradient changes no bit of the product"


def test_the_gradient_of_a_stack_goes_to_each_expert_s_rows() -> None:
    made = [packed_rows(32, 64, seed=seed) for seed in range(3)]
    stack = QuantizedStack([QuantizedWeight([rows], 64) for rows, _ in made])
    x_ND, first_rows = torch.randn(9, 64, requires_grad=True), torch.tensor([0, 4, 4, 9])
    y_NF = stack.matmul(x_ND, first_rows)
    gradient_NF = torch.randn_like(y_NF)
    y_NF.backward(gradient_NF)
    want = torch.cat((gradient_NF[:4] @ made[0][1], gradient_NF[4:] @ made[2][1]))
    torch.testing.assert_close(x_ND.grad, want, rtol=1e-5, atol=1e-5)


def gradients(base: Path, dtype: str, lora: LoraJob) -> tuple[float, Named]:
    """The mean loss and the gradients of a random adapter's tensors, by the trainer's own way of loading."""
    spec = spec_of(base)
    model = build(spec, whole(spec), torch.float32, "meta")
    own = TrainedAdapter(model, adapted_modules(lora, spec), getattr(torch, dtype))
    InitialWeights(LocalFiles(base), config=read_config(base)).fill_frozen([model], dtype, lora.few_bits)
    adapter_filler(lora, spec, 1)(own)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for update in own.of_linear.values():
            for b in update.B:
                b.copy_(torch.randn(b.shape, generator=draw) * 0.2)
    attend, adapt = TrainAttend(model.attention_specs(), TOKENS), own.of_microbatch(TOKENS, learns=True)
    x_TD = model(TOKENS.ids_T, TOKENS.positions_T, attend, TOKENS.lengths_T, adapt)
    loss = NextTokenLoss(whole(spec))(model, x_TD, TOKENS).loss / TOKENS.predicted
    loss.backward()
    assert any(map(is_empty, model.parameters())) == (dtype == "float32"), "weights stay packed but in float64"
    named: Named = {}
    for parameter in own.parameters():
        assert parameter.grad is not None
        for number, piece in enumerate(shard_of(parameter).pieces):
            place = tuple(slice(a, b) for a, b in piece.target)
            named[f"{piece.name}.{number}"] = parameter.grad[place]
    return float(loss.detach()), named


def plain_product(self: WeightParts, x_ND: Tensor, first_rows: Tensor, exact: bool) -> Tensor:
    """The packed product in plain numbers: x is not rounded."""
    y_NF = torch.zeros(len(x_ND), self.outputs, dtype=torch.float64)
    bounds = first_rows.tolist()
    for expert, at, part in self._parts():
        here = slice(bounds[expert], bounds[expert + 1])
        weight = part
        if isinstance(part, PackedRows):
            wide = unpack_rows(part.tensors, part.scheme, torch.arange(part.outputs), part.columns)
            weight = wide[:, part.lead : part.lead + x_ND.shape[1]]
        y_NF[here, at : at + len(weight)] = F.linear(x_ND[here].double(), weight.double())
    return y_NF if exact else y_NF.to(x_ND.dtype)


@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "deepseek_v3_moe"])
def test_gradients_are_those_of_a_model_of_the_numbers_that_its_weights_stand_for(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64 the model is those numbers. Packed products round their inputs to 8 bits, else all is equal."""
    save_model(case, tmp_path)
    lora = LoraJob(r=4, lora_alpha=8.0, quantize="int8")
    loss, want = gradients(tmp_path, "float64", lora)
    rounded_loss, rounded = gradients(tmp_path, "float32", lora)
    assert 1e-7 < abs(rounded_loss - loss) / loss < 0.02
    worst = max(apart(rounded, want).values())
    assert 1e-4 < worst < 0.5
    monkeypatch.setattr(WeightParts, "product", plain_product)
    exact_loss, exact = gradients(tmp_path, "float32", lora)
    assert abs(exact_loss - loss) / loss < 1e-6
    for name, distance in apart(exact, want).items():
        assert distance < 2e-5, f"{name}: {distance:.1e}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


@pytest.mark.slow
def test_every_plan_rounds_the_model_alike(model: Path, tmp_path: Path) -> None:
    """In float64, where the model is the numbers that its weights stand for, and runs are equal to rounding."""
    more: dict[str, Any] = dict(lora=LoraJob(r=4, quantize="int4"), max_steps=3)
    want = records(train(lora_job(model, tmp_path / "one", **more), "pp=1"))
    plain = records(train(lora_job(model, tmp_path / "plain", max_steps=3, lora=LoraJob(r=4)), "pp=1"))
    assert abs(plain[0].loss - want[0].loss) > 1e-4, "rounding to 4 bits is seen"
    for number, plan in enumerate(("tp=3,shares=1:2:1", "dp=2,pp=2,zero=1")):
        got = records(train(lora_job(model, tmp_path / f"run{number}", **more), plan))
        assert all(abs(a.loss - b.loss) < 1e-12 * b.loss for a, b in zip(got, want, strict=True))
        off, name = furthest(adapter(tmp_path / f"run{number}"), adapter(tmp_path / "one"))
        assert off < 1e-11, name


@pytest.mark.slow
@pytest.mark.parametrize("plan", soak_but(["pp=2,tp=1+2"], ["dp=2", "pp=2,tp=1+2"]))
def test_a_model_in_few_bits_is_trained_and_served_by_the_same_products(plan: str, model: Path, tmp_path: Path) -> None:
    lora = LoraJob(r=4, quantize="int8")
    got = records(train(job_for(model, tmp_path / "run", lora=lora, learning_rate=1e-2, max_steps=8), plan))
    assert len(got) == 8 and all(record.loss > 0 for record in got)
    final = tmp_path / "run" / "final"

    def fill(chunk: Any, base: Path) -> None:
        InitialWeights(LocalFiles(base), config=read_config(base)).fill_frozen([chunk], "float32", "int8")

    own = trained_scores(model, final, fill)
    with engine_with(model, [final], quantize="int8") as (engine, (name,)):
        served = scores(engine, name)
    # What float32 rounds differently in attention may round an input of a product to the next of its 255 numbers.
    off, of_plain = (served - own).abs(), (served - trained_scores(model, final)).abs()
    assert float((off < 1e-5).double().mean()) > 0.25 and float((of_plain < 1e-5).double().mean()) < 0.05
    assert float(off.mean()) < 0.01
