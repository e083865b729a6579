"""DoRA beside weights in few bits (QDoRA): PEFT's DoRA over the numbers that the weights stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

from tests.parity.engine.lora.test_lora import engine_with, peft_scores, save_rounded, scores
from tests.parity.training.lora.test_lora import (
    TARGETS,
    TOKENS,
    Named,
    adapter,
    lora_job,
    peft_gradients,
    trained_scores,
)
from tests.parity.training.lora.test_quantized_lora import plain_product
from tests.support.models.adapters import peft_dora
from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tests.support.models.reference_gradients import apart, in_float64
from tests.support.models.slow_load import slices
from tests.support.selection import soak_but
from tests.support.training.runs import records, train
from tests.support.training.training_step import furthest
from tllm.model.transformer import build
from tllm.parallel.lora import lora_update
from tllm.parallel.mesh import whole
from tllm.parallel.quantized_weight import WeightParts, is_empty
from tllm.parallel.shard import shard_of
from tllm.quantization.blocks import dequantize
from tllm.quantization.round_weights import round_weights
from tllm.spec.hf_config import read_config
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.job.lora_job import LoraJob
from tllm.training.lora.trained_adapter import TrainedAdapter
from tllm.training.objectives.next_token import NextTokenLoss
from tllm.training.state.initial_weights import InitialWeights
from tllm.weights.byte_source import LocalFiles
from tllm.weights.load import load
from tllm.weights.lora.adapter_files import read_adapter

QDORA = LoraJob(r=4, lora_alpha=8.0, use_dora=True, quantize="int4")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same with its linears rounded to int4 and back, and its logits' table to int8."""
    folder = tmp_path_factory.mktemp("model")
    base, rounded = folder / "base", folder / "rounded"
    save_model("llama", base)
    rounded.mkdir()
    save_rounded(base, rounded)
    tensors = load_file(rounded / "model.safetensors")
    tensors["lm_head.weight"] = dequantize(round_weights(tensors["lm_head.weight"], "int8"))
    save_file(tensors, rounded / "model.safetensors", {"format": "pt"})
    return base, rounded


def packed_gradients(base: Path, adapter: Path, dtype: str) -> tuple[float, Named]:
    """The mean loss and the gradients of an adapter's tensors beside int4, as a run loads the model."""
    spec, source = spec_of(base), LocalFiles(adapter)
    model = build(spec, whole(spec), torch.float32, "meta")
    found = read_adapter(source)
    trained = TrainedAdapter(model, found.modules, getattr(torch, dtype))
    InitialWeights(LocalFiles(base), config=read_config(base)).fill_frozen([model], dtype, "int4")
    load(trained, found.index, source)
    attend, adapt = TrainAttend(model.attention_specs(), TOKENS), trained.of_microbatch(TOKENS, learns=True)
    x_TD = model(TOKENS.ids_T, TOKENS.positions_T, attend, TOKENS.lengths_T, adapt)
    loss = NextTokenLoss(whole(spec))(model, x_TD, TOKENS).loss / TOKENS.predicted
    loss.backward()
    assert any(map(is_empty, model.parameters())) == (dtype == "float32"), "weights stay packed but in float64"
    named = {name: torch.full(found.index.shape(name), torch.nan, dtype=torch.float64) for name in found.index.entries}
    for parameter in trained.parameters():
        assert parameter.grad is not None
        for piece in shard_of(parameter).pieces:
            named[piece.name][slices(piece.source)] = parameter.grad[slices(piece.target)].double()
    return float(loss.detach()), named


def test_gradients_are_those_of_peft_over_the_numbers_that_weights_stand_for(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed products round their inputs to 8 bits, which is left out here: all else is equal to rounding."""
    base, rounded = folders
    monkeypatch.setattr(lora_update, "ELEMENTS_AT_ONCE", 500)  # so that norms are of some rows after others
    truth = transformers.AutoModelForCausalLM.from_pretrained(rounded, attn_implementation="eager")
    peft = peft_dora(truth, tmp_path, TARGETS["llama"], rank_pattern={"down_proj": 6}, use_rslora=True)
    _, of_float32 = peft_gradients(peft, TOKENS)
    with in_float64(peft):
        loss, want = peft_gradients(peft, TOKENS)
    plain = {name: name.replace("magnitude_vector.weight", "magnitude_vector") for name in want}
    want, of_float32 = ({plain[name]: x for name, x in some.items()} for some in (want, of_float32))
    assert sum("magnitude_vector" in name for name in want) == len(want) // 3
    got_loss, got = packed_gradients(base, tmp_path, "float64")
    assert abs(got_loss - loss) < 1e-10 * loss
    for name, distance in apart(got, want).items():
        assert distance < 1e-10, f"{name}: {distance:.1e}"
    monkeypatch.setattr(WeightParts, "product", plain_product)
    got_loss, got = packed_gradients(base, tmp_path, "float32")
    assert abs(got_loss - loss) < 1e-6 * loss
    of_peft = apart(of_float32, want)
    for name, distance in apart(got, want).items():
        assert distance < max(1e-6, 3 * of_peft[name]), f"{name}: {distance:.1e} and PEFT's {of_peft[name]:.1e}"


PLANS = ("tp=3,shares=1:2:1", "dp=2,pp=2,zero=1", "tp=2,sequence=true,recompute=layer")


@pytest.fixture(scope="module")
def golden(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Losses and folder of the run on one rank."""
    run = tmp_path_factory.mktemp("golden") / "run"
    job = lora_job(folders[0], run, lora=QDORA, max_steps=3)
    return [record.loss for record in records(train(job, "pp=1"))], run


@pytest.mark.slow
@pytest.mark.parametrize("plan", soak_but(PLANS[:1], PLANS))
def test_every_plan_is_the_run_of_one_process(
    plan: str, folders: tuple[Path, Path], golden: tuple[list[float], Path], tmp_path: Path
) -> None:
    """In float64, where the model is the numbers that its weights stand for, and runs are equal to rounding."""
    got = records(train(lora_job(folders[0], tmp_path / "run", lora=QDORA, max_steps=3), plan))
    assert all(abs(a.loss - b) < 1e-12 * b for a, b in zip(got, golden[0], strict=True))
    off, name = furthest(adapter(tmp_path / "run"), adapter(golden[1]))
    assert off < 1e-11, name


def test_a_run_is_that_beside_the_rounded_model_and_peft_reads_it(
    folders: tuple[Path, Path], golden: tuple[list[float], Path], tmp_path: Path
) -> None:
    base, rounded = folders
    plain: Any = LoraJob(r=4, lora_alpha=8.0, use_dora=True)
    want = records(train(lora_job(rounded, tmp_path / "run", lora=plain, max_steps=3), "pp=1"))
    assert all(abs(a.loss - b) < 1e-12 * b for a, b in zip(want, golden[0], strict=True))
    final = golden[1] / "final"
    truth = transformers.AutoModelForCausalLM.from_pretrained(rounded, attn_implementation="eager")
    bare = peft_scores(truth)
    of_peft = peft_scores(PeftModel.from_pretrained(truth, str(final)).eval())
    assert (of_peft - bare).abs().max() > 0.05
    torch.testing.assert_close(trained_scores(rounded, final), of_peft, rtol=0, atol=2e-5)
    with engine_with(base, [final], "tp=2", quantize="int4") as (engine, (lora,)):
        # Products with packed weights round their activations to 8 bits.
        assert (scores(engine, lora) - of_peft).abs().mean() < 0.2 * (of_peft - bare).abs().mean()


@pytest.mark.slow
def test_a_model_in_few_bits_is_trained_and_served_by_the_same_products(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Both in float32 with inputs rounded to 8 bits, where inputs are cut too."""
    base, _ = folders
    got = records(train(lora_job(base, tmp_path / "run", lora=QDORA, dtype="float32", max_steps=4), "pp=2,tp=1+2"))
    assert len(got) == 4
    final = tmp_path / "run" / "final"

    def fill(chunk: Any, folder: Path) -> None:
        InitialWeights(LocalFiles(folder), config=read_config(folder)).fill_frozen([chunk], "float32", "int4")

    own, of_plain = trained_scores(base, final, fill), trained_scores(base, final)
    with engine_with(base, [final], quantize="int4") as (engine, (lora,)):
        served = scores(engine, lora)
    assert float((served - own).abs().mean()) < 0.01 < float((served - of_plain).abs().mean())
