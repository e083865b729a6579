"""LoRA in training: gradients against PEFT, every plan against one process, and what others read of a finished run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from tests.parity.engine.lora.test_lora import PROMPT, engine_with, peft_scores, scores
from tests.support.models.adapters import peft_adapter
from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tests.support.models.reference_gradients import apart, in_float64, packed
from tests.support.models.slow_load import slices, slow_load
from tests.support.selection import soak_but
from tests.support.training.runs import records, short_job, train
from tests.support.training.training_step import furthest
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import whole
from tllm.parallel.shard import shard_of
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.checkpoint.checkpoint import open_folder
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.encoder import IGNORED
from tllm.training.job.lora_job import LoraJob
from tllm.training.lora.trained_adapter import TrainedAdapter
from tllm.training.objectives.next_token import NextTokenLoss
from tllm.training.report.events import RunEnded
from tllm.weights.byte_source import LocalFiles
from tllm.weights.load import load
from tllm.weights.lora.adapter_files import read_adapter

TARGETS: dict[str, Sequence[str]] = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "llama_mha_tied_bias": ("q_proj", "v_proj", "down_proj"),  # some parts of what is merged
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "qwen2_moe": ("q_proj", "v_proj", "o_proj", "shared_expert.gate_proj", "shared_expert.down_proj"),
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "deepseek_v3_moe": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "qwen3_next_moe": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "v_proj", "o_proj"),
}
TOKENS = packed([1, 7, 18, 24])
PLANS = (
    "dp=3:1",
    "pp=2",
    "pp=4,schedule=gpipe",
    "pp=2,schedule=zero_bubble,depth=2",
    "pp=2,chunks=2",
    "tp=2",
    "tp=3,shares=1:2:1",
    "tp=2,sequence=true",
    "cp=2",
    "dp=2,zero=1",
    "dp=2,zero=2,recompute=layer",
    "dp=2,pp=2,tp=2,zero=2,sequence=true,schedule=zero_bubble",
    "dp=2,pp=2,cp=2,recompute=selective",
)
LORA = LoraJob(r=4, lora_alpha=8.0, lora_dropout=0.2)
Named = dict[str, Tensor]


def our_gradients(
    base: Path, adapter: Path, dtype: torch.dtype, tokens: Tokens = TOKENS, dropout: float = 0.0
) -> tuple[float, Named]:
    """The mean loss and the gradients of an adapter's tensors."""
    spec, source = spec_of(base), LocalFiles(adapter)
    model = build(spec, whole(spec), dtype)
    slow_load(model, base)
    found = read_adapter(source)
    trained = TrainedAdapter(model, found.modules, dtype, dropout)
    load(trained, found.index, source)
    adapt = trained.of_microbatch(tokens, learns=True)
    x_TD = model(
        tokens.ids_T, tokens.positions_T, TrainAttend(model.attention_specs(), tokens), tokens.lengths_T, adapt
    )
    loss = NextTokenLoss(whole(spec))(model, x_TD, tokens).loss / tokens.predicted
    loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters()), "the model itself is frozen"
    named = {name: torch.full(found.index.shape(name), torch.nan, dtype=dtype) for name in found.index.entries}
    for parameter in trained.parameters():
        assert parameter.grad is not None
        for piece in shard_of(parameter).pieces:
            named[piece.name][slices(piece.source)] = parameter.grad[slices(piece.target)]
    return float(loss.detach()), named


def peft_gradients(model: PeftModel, tokens: Tokens) -> tuple[float, Named]:
    """The same by PEFT, a document at a time."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for ids, labels in zip(tokens.ids_T.split(tokens.lengths), tokens.labels_T.split(tokens.lengths), strict=True):
        logits_TV = model(ids[None], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits_TV, labels, reduction="sum", ignore_index=IGNORED)
    loss = total / tokens.predicted
    loss.backward()
    named = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return float(loss.detach()), named


def gradients_of_peft(peft: PeftModel, folder: Path) -> Named:
    """PEFT's in float64, to which ours are equal beside the model `base` and the adapter `adapter` of a folder."""
    _, rounded = peft_gradients(peft, TOKENS)
    with in_float64(peft):
        loss, want = peft_gradients(peft, TOKENS)
    got_loss, got = our_gradients(folder / "base", folder / "adapter", torch.float64)
    assert abs(got_loss - loss) < 1e-10 * loss
    for name, distance in apart(got, want).items():
        assert distance < 1e-10, f"{name}: {distance:.1e}"
    _, in_32 = our_gradients(folder / "base", folder / "adapter", torch.float32)
    of_peft = apart(rounded, want)
    for name, distance in apart(in_32, want).items():
        # Some gradients are small differences of large numbers: float32 itself rounds them by more.
        assert distance < max(1e-6, 3 * of_peft[name]), f"{name}: {distance:.1e} and PEFT's {of_peft[name]:.1e}"
    return want


@pytest.mark.parametrize("case", TARGETS)
def test_gradients_are_those_of_peft(case: str, tmp_path: Path) -> None:
    truth = save_model(case, tmp_path / "base")
    config: dict[str, Any] = dict(rank_pattern={TARGETS[case][-1]: 6}, alpha_pattern={TARGETS[case][0]: 3})
    peft = peft_adapter(truth, tmp_path / "adapter", TARGETS[case], use_rslora=True, **config)
    want = gradients_of_peft(peft, tmp_path)
    assert min(float(gradient.norm()) for gradient in want.values()) > 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


def lora_job(model: Path, run: Path, **more: Any) -> Any:
    return short_job(model, run, **{"dtype": "float64", "lora": LORA, "learning_rate": 1e-2, **more})


def adapter(run: Path) -> Named:
    return load_file(run / "final" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def golden(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Losses and folder of the run on one rank."""
    run = tmp_path_factory.mktemp("golden") / "run"
    return [record.loss for record in records(train(lora_job(model, run), "pp=1"))], run


@pytest.mark.slow
@pytest.mark.parametrize("plan", soak_but([PLANS[6], PLANS[10], PLANS[12]], PLANS))
def test_every_plan_is_the_run_of_one_process(
    plan: str, model: Path, golden: tuple[list[float], Path], tmp_path: Path
) -> None:
    """Dropout is the same under each: what is drawn hangs on no plan."""
    want, folder = golden
    got = [record.loss for record in records(train(lora_job(model, tmp_path / "run"), plan))]
    assert max(abs(a - b) / b for a, b in zip(got, want, strict=True)) < 1e-12
    off, name = furthest(adapter(tmp_path / "run"), adapter(folder))
    assert off < 1e-11, name


SPREAD = ("dp=2,ep=2", "dp=2,tp=2,ep=2,zero=1", "tp=2,experts=spread")


@pytest.mark.slow
@pytest.mark.parametrize("plan", soak_but(SPREAD[1:], SPREAD))
def test_experts_that_are_spread_stay_as_they_are(plan: str, tmp_path: Path) -> None:
    save_model("qwen2_moe", tmp_path / "model")
    more: dict[str, Any] = dict(max_steps=2, router_aux_loss_coef=0.01)
    want = records(train(lora_job(tmp_path / "model", tmp_path / "one", **more), "pp=1"))
    got = records(train(lora_job(tmp_path / "model", tmp_path / "run", **more), plan))
    assert all(abs(a.loss - b.loss) < 1e-12 * b.loss for a, b in zip(got, want, strict=True))
    off, name = furthest(adapter(tmp_path / "run"), adapter(tmp_path / "one"))
    assert off < 1e-11, name


@pytest.mark.slow
@pytest.mark.parametrize("plan", soak_but(["pp=4,schedule=zero_bubble"], ["pp=4", "pp=4,schedule=zero_bubble"]))
def test_a_stage_may_have_nothing_to_learn(plan: str, tmp_path: Path) -> None:
    """Of this model's layers one has a q_proj, the third."""
    save_model("qwen3_next_moe", tmp_path / "model")
    more: dict[str, Any] = dict(max_steps=2, lora=LoraJob(r=2, target_modules=("q_proj",)))
    want = records(train(lora_job(tmp_path / "model", tmp_path / "one", **more), "pp=1"))
    got = records(train(lora_job(tmp_path / "model", tmp_path / "run", **more), plan))
    assert all(abs(a.loss - b.loss) < 1e-12 * b.loss for a, b in zip(got, want, strict=True))
    assert {name.split(".")[4] for name in adapter(tmp_path / "run")} == {"2"}


CHANGES = [("pp=1", "dp=2,zero=2"), ("dp=2,pp=2,zero=1", "tp=2")]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), soak_but(CHANGES[1:], CHANGES))
def test_a_run_that_is_stopped_goes_on_under_another_plan(
    before: str, after: str, model: Path, golden: tuple[list[float], Path], tmp_path: Path
) -> None:
    want, folder = golden
    job, steps = lora_job(model, tmp_path / "run"), itertools.count(1)
    first = train(job, before, lambda: next(steps) >= 3)
    assert isinstance(first[-1], RunEnded) and first[-1].final == ""
    second = train(job, after)
    got = [record.loss for record in records([*first, *second])]
    assert max(abs(a - b) / b for a, b in zip(got, want, strict=True)) < 1e-12
    off, name = furthest(adapter(tmp_path / "run"), adapter(folder))
    assert off < 1e-11, name


def test_a_save_holds_the_adapter_and_its_states_alone(golden: tuple[list[float], Path]) -> None:
    shapes = open_folder(golden[1] / "step-4").shapes
    names = {name.rpartition("/")[2] for name in shapes}
    assert len(names) == 4 * 7 * 2 and all(".lora_A." in name or ".lora_B." in name for name in names)
    assert len(shapes) == 3 * len(names), "values, and two states of AdamW"


@pytest.mark.slow
def test_ways_to_send_less_and_local_steps_train_adapters_too(model: Path, tmp_path: Path) -> None:
    for number, way in enumerate((dict(local_steps=2), dict(delay_steps=1), dict(gradient_compression="int8"))):
        got = records(train(lora_job(model, tmp_path / f"run{number}", dtype="float32", max_steps=3, **way), "dp=2"))
        assert len(got) == 3 and adapter(tmp_path / f"run{number}")


@pytest.mark.slow
def test_deterministic_runs_end_in_the_same_bits(model: Path, tmp_path: Path) -> None:
    ended = []
    for number, plan in enumerate(("pp=1", "dp=4,zero=2", "pp=2")):
        train(lora_job(model, tmp_path / f"run{number}", deterministic=True, dtype="float32", max_steps=3), plan)
        ended.append(adapter(tmp_path / f"run{number}"))
    assert all(torch.equal(ended[0][name], other[name]) for other in ended[1:] for name in ended[0])


@pytest.mark.parametrize("case", ["llama", "qwen2_moe"])
def test_a_finished_run_is_read_by_peft_and_served_beside_the_model(case: str, tmp_path: Path) -> None:
    truth = save_model(case, tmp_path / "base")
    bare = peft_scores(truth)
    lora = LoraJob(r=4, lora_alpha=8.0, use_rslora=True)
    train(short_job(tmp_path / "base", tmp_path / "run", lora=lora, learning_rate=3e-2, max_steps=4), "dp=2")
    final = tmp_path / "run" / "final"
    config = json.loads((final / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base") and config["r"] == 4 and config["use_rslora"]
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    want = peft_scores(PeftModel.from_pretrained(fresh, str(final)).eval())
    assert (want - bare).abs().max() > 0.05, "an adapter that does nothing would hide a fault"
    with engine_with(tmp_path / "base", [final], "tp=2") as (engine, (name,)):
        torch.testing.assert_close(scores(engine, name), want, rtol=0, atol=2e-5)
        torch.testing.assert_close(scores(engine, ""), bare, rtol=0, atol=2e-5)
        served = scores(engine, name)
    torch.testing.assert_close(trained_scores(tmp_path / "base", final), served, rtol=0, atol=2e-5)


def trained_scores(base: Path, final: Path, fill: Callable[[Transformer, Path], None] = slow_load) -> Tensor:
    """Log-probabilities of the prompt by the trainer's own passes."""
    spec, source = spec_of(base), LocalFiles(final)
    model = build(spec, whole(spec), torch.float32)
    fill(model, base)
    found = read_adapter(source)
    trained = TrainedAdapter(model, found.modules, torch.float32)
    load(trained, found.index, source)
    ids_T = torch.tensor(PROMPT)
    tokens = Tokens(ids_T, ids_T, torch.arange(len(ids_T)), [len(ids_T)])
    attend, adapt = TrainAttend(model.attention_specs(), tokens), trained.of_microbatch(tokens, learns=False)
    logits_TV = model.logits(model(ids_T, tokens.positions_T, attend, tokens.lengths_T, adapt)).double()
    return logits_TV.log_softmax(-1)[range(len(PROMPT) - 1), PROMPT[1:]].detach()
