"""DoRA in training: gradients, norms and merged models of PEFT, and every plan against one process."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file

from tests.parity.engine.lora.test_lora import engine_with, peft_scores, scores
from tests.parity.training.lora.test_lora import (
    TARGETS,
    TOKENS,
    adapter,
    lora_job,
    our_gradients,
    peft_gradients,
    trained_scores,
)
from tests.support.models.adapters import peft_dora
from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tests.support.models.reference_gradients import apart, in_float64
from tests.support.models.slow_load import slow_load
from tests.support.selection import soak_but
from tests.support.training.runs import records, train
from tests.support.training.training_step import furthest
from tllm.core.errors import ConfigError
from tllm.model.transformer import build
from tllm.parallel.mesh import whole
from tllm.training.data.seeds import DRAWS, draws_of
from tllm.training.job.lora_job import LoraJob
from tllm.training.lora.lora_dropout import dropped_out
from tllm.training.lora.merged_model import write_merged
from tllm.training.lora.trained_adapter import TrainedAdapter
from tllm.weights.byte_source import LocalFiles
from tllm.weights.load import load
from tllm.weights.lora.adapter_files import read_adapter

DORA = LoraJob(r=4, lora_alpha=8.0, lora_dropout=0.2, use_dora=True)
MAGNITUDE = ".lora_magnitude_vector"
PLANS = (
    "dp=2,pp=2,tp=2,zero=2,sequence=true,schedule=zero_bubble",
    "tp=3,shares=1:2:1",
    "dp=2,pp=2,cp=2,recompute=selective",
    "tp=2,recompute=layer",
    "dp=3:1,zero=1",
    "pp=2,chunks=2",
)


@pytest.mark.parametrize("case", ["llama", "phi3", "qwen2_moe", "deepseek_v3_moe", "qwen3_next_moe"])
def test_gradients_are_those_of_peft(case: str, tmp_path: Path) -> None:
    truth = save_model(case, tmp_path / "base")
    config: dict[str, Any] = dict(rank_pattern={TARGETS[case][-1]: 6}, use_rslora=True)
    peft = peft_dora(truth, tmp_path / "adapter", TARGETS[case], **config)
    with in_float64(peft):
        loss, want = peft_gradients(peft, TOKENS)
    want = {name.replace(f"{MAGNITUDE}.weight", MAGNITUDE): gradient for name, gradient in want.items()}
    assert sum(MAGNITUDE in name for name in want) == len(want) // 3
    assert min(float(gradient.norm()) for gradient in want.values()) > 1e-5
    got_loss, got = our_gradients(tmp_path / "base", tmp_path / "adapter", torch.float64)
    assert abs(got_loss - loss) < 1e-10 * loss
    for name, distance in apart(got, want).items():
        assert distance < 1e-10, f"{name}: {distance:.1e}"


def test_dropout_is_where_peft_has_it(tmp_path: Path) -> None:
    """PEFT's layer with our draws in its dropout's place: magnitudes change the product of what is left."""
    truth = save_model("llama", tmp_path / "base").double()
    peft = peft_dora(truth, tmp_path / "adapter", ("o_proj",))
    spec, source = spec_of(tmp_path / "base"), LocalFiles(tmp_path / "adapter")
    model = build(spec, whole(spec), torch.float64)
    slow_load(model, tmp_path / "base")
    found = read_adapter(source)
    trained = TrainedAdapter(model, found.modules, torch.float64, dropout=0.3)
    load(trained, found.index, source)
    linear = model.get_submodule("layers.0.attention.o_proj")
    layer = peft.get_submodule("base_model.model.model.layers.0.self_attn.o_proj").double().train()
    x_TD = torch.randn(int(TOKENS.ids_T.numel()), layer.in_features, dtype=torch.float64)
    draws_T = torch.from_numpy(draws_of(1, 2, 3, len(x_TD)))
    name = "model.layers.0.self_attn.o_proj.lora_A.weight"
    layer.lora_dropout["default"] = _Ours(draws_T, name)
    tokens = replace(TOKENS, of_tokens={DRAWS: draws_T})
    with torch.no_grad():
        got, undropped = (
            trained.of_microbatch(tokens, learns)(linear, x_TD, x_TD @ linear.weight.T) for learns in (True, False)
        )
        assert (got - undropped).abs().max() > 0.1
        torch.testing.assert_close(got, layer(x_TD), rtol=1e-10, atol=1e-10)


class _Ours(torch.nn.Module):
    """Dropout by our draws."""

    def __init__(self, draws_T: torch.Tensor, name: str) -> None:
        super().__init__()
        self.draws_T, self.name = draws_T, name

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return dropped_out(x_TD, self.draws_T, self.name, 0, 0.3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def golden(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Losses and folder of the run on one rank."""
    run = tmp_path_factory.mktemp("golden") / "run"
    return [record.loss for record in records(train(lora_job(model, run, lora=DORA), "pp=1"))], run


@pytest.mark.slow
@pytest.mark.parametrize("plan", soak_but([PLANS[1], PLANS[2]], PLANS))
def test_every_plan_is_the_run_of_one_process(
    plan: str, model: Path, golden: tuple[list[float], Path], tmp_path: Path
) -> None:
    """With dropout, and with norms of cut rows, which are summed over ranks."""
    want, folder = golden
    got = [record.loss for record in records(train(lora_job(model, tmp_path / "run", lora=DORA), plan))]
    assert max(abs(a - b) / b for a, b in zip(got, want, strict=True)) < 1e-12
    off, name = furthest(adapter(tmp_path / "run"), adapter(folder))
    assert off < 1e-11, name


def test_a_run_that_is_stopped_goes_on_with_the_same_bits(
    model: Path, golden: tuple[list[float], Path], tmp_path: Path
) -> None:
    job, steps = lora_job(model, tmp_path / "run", lora=DORA), itertools.count(1)
    train(job, "pp=1", lambda: next(steps) >= 3)
    train(job, "pp=1")
    got, want = adapter(tmp_path / "run"), adapter(golden[1])
    assert all(torch.equal(got[name], want[name]) for name in want)
    first = load_file(model / "model.safetensors")
    moved = [
        (x - first[name.removeprefix("base_model.model.").replace(MAGNITUDE, ".weight")].norm(dim=1)).abs().max()
        for name, x in want.items()
        if name.endswith(MAGNITUDE)
    ]
    assert len(moved) == 4 * 7 and min(moved) > 1e-3, "every magnitude has learned"


def test_a_run_begins_with_the_model_as_it_was(model: Path, tmp_path: Path) -> None:
    (with_dora,), (without,) = (
        records(train(lora_job(model, tmp_path / f"run{number}", lora=lora, max_steps=1), "tp=2"))
        for number, lora in enumerate((LoraJob(r=4, use_dora=True), LoraJob(r=4)))
    )
    assert abs(with_dora.loss - without.loss) < 1e-12


def test_peft_reads_a_finished_run_and_merges_it_alike(model: Path, golden: Any, tmp_path: Path) -> None:
    final = golden[1] / "final"
    assert json.loads((final / "adapter_config.json").read_text())["use_dora"] is True
    truth = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    bare = peft_scores(truth)
    peft = PeftModel.from_pretrained(truth, str(final)).eval()
    want = peft_scores(peft)
    assert (want - bare).abs().max() > 0.05, "an adapter that does nothing would hide a fault"
    torch.testing.assert_close(trained_scores(model, final), want, rtol=0, atol=2e-5)
    with engine_with(model, [final], "tp=2") as (engine, (lora,)):
        torch.testing.assert_close(scores(engine, lora), want, rtol=0, atol=2e-5)
    write_merged(model, tmp_path / "merged", [final], "float64")
    got = load_file(tmp_path / "merged" / "model.safetensors")
    merged = peft.double().merge_and_unload()
    saved = load_file(final / "adapter_model.safetensors")
    for name, x in merged.named_parameters():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        bound = 1e-6 if f"{module}{MAGNITUDE}" in saved else 0.0  # PEFT has read the adapter as float32
        torch.testing.assert_close(got[name], x.detach(), rtol=bound, atol=bound)


def test_a_merged_model_is_that_of_peft_in_float64(model: Path, tmp_path: Path) -> None:
    truth = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    peft = peft_dora(truth, tmp_path / "adapter", TARGETS["llama"])
    write_merged(model, tmp_path / "merged", [tmp_path / "adapter"], "float64")
    got = load_file(tmp_path / "merged" / "model.safetensors")
    for name, x in peft.double().merge_and_unload().named_parameters():
        torch.testing.assert_close(got[name], x.detach(), rtol=1e-10, atol=1e-10)
    with pytest.raises(ConfigError, match="2 adapters are to be merged, and one has use_dora"):
        write_merged(model, tmp_path / "two", [tmp_path / "adapter"] * 2)
