"""Adapters of `kv_b_proj`, which attention over latents takes apart: as PEFT, which multiplies latents by it whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel

from tests.parity.engine.lora.test_lora import engine_with, peft_scores, scores
from tests.parity.training.lora.test_dora import MAGNITUDE
from tests.parity.training.lora.test_lora import (
    TOKENS,
    adapter,
    gradients_of_peft,
    lora_job,
    our_gradients,
    peft_gradients,
    trained_scores,
)
from tests.support.models.adapters import peft_adapter, peft_dora, save_adapter
from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tests.support.models.reference_gradients import apart, in_float64
from tests.support.selection import soak_but
from tests.support.training.runs import records, train
from tests.support.training.training_step import furthest
from tllm.core.errors import PlanError
from tllm.spec.plan import Plan
from tllm.training.data.seeds import DRAWS, draws_of
from tllm.training.job.combinations import check_combination
from tllm.training.job.lora_job import LoraJob
from tllm.training.lora.lora_dropout import dropped_out
from tllm.training.lora.merged_model import write_merged

TARGETS = {"deepseek_v3_moe": ("q_b_proj", "kv_b_proj", "o_proj"), "deepseek_v2_moe": ("q_proj", "kv_b_proj")}
LATENT = LoraJob(r=4, lora_alpha=8.0, target_modules=("kv_b_proj", "q_a_proj", "gate_proj"))
KINDS = {
    "lora": LATENT,
    "dropout": replace(LATENT, lora_dropout=0.2, target_modules=("kv_b_proj", "q_a_proj", "o_proj")),
    "dora": replace(LATENT, lora_dropout=0.2, target_modules=("kv_b_proj", "q_a_proj", "o_proj"), use_dora=True),
}
"""None of the last two names an expert, which has neither."""
OF = {False: peft_adapter, True: peft_dora}
"""What makes PEFT's model, by whether it has DoRA."""


@pytest.mark.parametrize("case", TARGETS)
def test_gradients_are_those_of_peft(case: str, tmp_path: Path) -> None:
    truth = save_model(case, tmp_path / "base")
    peft = peft_adapter(truth, tmp_path / "adapter", TARGETS[case], use_rslora=True, rank_pattern={"kv_b_proj": 6})
    want = gradients_of_peft(peft, tmp_path)
    assert min(float(gradient.norm()) for name, gradient in want.items() if "kv_b_proj" in name) > 1e-3


@pytest.mark.parametrize(("use_dora", "dropout"), [(True, 0.0), (False, 0.3), (True, 0.3)])
@pytest.mark.parametrize("case", TARGETS)
def test_gradients_with_magnitudes_and_dropout_are_those_of_peft(
    case: str, use_dora: bool, dropout: float, tmp_path: Path
) -> None:
    """PEFT drops some of the latents before it multiplies them by A; here with our draws in its dropout's place."""
    truth = save_model(case, tmp_path / "base")
    peft = OF[use_dora](truth, tmp_path / "adapter", ["kv_b_proj"], use_rslora=True)
    draws_T = torch.from_numpy(draws_of(1, 2, 3, int(TOKENS.ids_T.numel())))
    undropped, _ = peft_gradients(peft, TOKENS)
    if dropout:
        peft.train()
        for name, layer in peft.named_modules():
            if name.endswith("kv_b_proj"):
                part_A = f"{name.removeprefix('base_model.model.')}.lora_A.weight"
                layer.lora_dropout["default"] = _Ours(draws_T, part_A, dropout)
    with in_float64(peft):
        loss, want = peft_gradients(peft, TOKENS)
    want = {name.replace(f"{MAGNITUDE}.weight", MAGNITUDE): gradient for name, gradient in want.items()}
    assert len(want) == (12 if use_dora else 8)
    assert min(float(gradient.norm()) for gradient in want.values()) > 1e-4
    assert not dropout or abs(undropped - loss) > 1e-4, "nothing is dropped"
    tokens = replace(TOKENS, of_tokens={DRAWS: draws_T})
    got_loss, got = our_gradients(tmp_path / "base", tmp_path / "adapter", torch.float64, tokens, dropout)
    assert abs(got_loss - loss) < 1e-10 * loss
    for name, distance in apart(got, want).items():
        assert distance < 1e-10, f"{name}: {distance:.1e}"


class _Ours(torch.nn.Module):
    """Dropout by our draws, of one document after another."""

    def __init__(self, draws_T: torch.Tensor, name: str, part: float) -> None:
        super().__init__()
        self.draws_T, self.name, self.part, self.at = draws_T, name, part, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draws_T = self.draws_T[self.at :][: x.shape[-2]]
        self.at += len(draws_T)
        return dropped_out(x.flatten(0, -2), draws_T, self.name, 0, self.part).view(x.shape)


@pytest.mark.parametrize("plan", soak_but(["tp=3,shares=1:2:1"], ["pp=1", "pp=2,tp=1+2", "tp=3,shares=1:2:1"]))
@pytest.mark.parametrize("use_dora", OF)
@pytest.mark.parametrize("case", TARGETS)
def test_an_adapter_is_served_beside_the_cache_of_latents_and_merged(
    case: str, use_dora: bool, plan: str, tmp_path: Path
) -> None:
    truth = save_model(case, tmp_path / "base")
    bare = peft_scores(truth)
    peft = OF[use_dora](truth, tmp_path / "adapter", ["kv_b_proj"])
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


@pytest.fixture(scope="module", params=KINDS)
def golden(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[float], Path, LoraJob]:
    """Losses and folder of the run on one rank, with what it trained."""
    run, lora = tmp_path_factory.mktemp("golden") / "run", KINDS[request.param]
    job = lora_job(model, run, lora=lora, max_steps=3)
    return [record.loss for record in records(train(job, "pp=1"))], run, lora


PLANS = ("tp=3,shares=1:2:1", "dp=2,pp=2,zero=2", "tp=2,sequence=true,recompute=layer", "cp=2,recompute=selective")


@pytest.mark.slow
@pytest.mark.parametrize("plan", soak_but(PLANS[:1], PLANS))
def test_every_plan_is_the_run_of_one_process(
    plan: str, model: Path, golden: tuple[list[float], Path, LoraJob], tmp_path: Path
) -> None:
    got = records(train(lora_job(model, tmp_path / "run", lora=golden[2], max_steps=3), plan))
    assert all(abs(a.loss - b) < 1e-12 * b for a, b in zip(got, golden[0], strict=True))
    off, name = furthest(adapter(tmp_path / "run"), adapter(golden[1]))
    assert off < 1e-11, name


def test_a_finished_run_has_the_trainer_s_own_numbers(model: Path, golden: tuple[list[float], Path, LoraJob]) -> None:
    final = golden[1] / "final"
    assert sum("kv_b_proj" in name for name in adapter(golden[1])) == 4 * (3 if golden[2].use_dora else 2)
    with engine_with(model, [final], "tp=2") as (engine, (lora,)):
        served, bare = scores(engine, lora), scores(engine, "")
    assert (served - bare).abs().max() > 0.01
    torch.testing.assert_close(trained_scores(model, final), served, rtol=0, atol=2e-5)


@pytest.mark.parametrize("use_dora", OF)
def test_peft_reads_it(model: Path, use_dora: bool, tmp_path: Path) -> None:
    lora = LoraJob(r=4, lora_alpha=8.0, target_modules=("kv_b_proj",), use_dora=use_dora)
    train(lora_job(model, tmp_path / "run", lora=lora, max_steps=2), "pp=1")
    truth = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    want = peft_scores(PeftModel.from_pretrained(truth, str(tmp_path / "run" / "final")).eval())
    torch.testing.assert_close(trained_scores(model, tmp_path / "run" / "final"), want, rtol=0, atol=2e-5)


def test_what_cannot_be_computed_is_refused(model: Path, tmp_path: Path) -> None:
    job, spec = lora_job(model, tmp_path / "run", lora=LATENT), spec_of(model)
    with pytest.raises(PlanError, match=r"zero_bubble, .* whose A and B are used twice"):
        check_combination(job, Plan.parse("pp=2,schedule=zero_bubble", spec.num_layers), spec)
