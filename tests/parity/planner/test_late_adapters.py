"""Where only late layers are adapted no gradient goes below the lowest of them, and the planner counts none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from tests.parity.planner.trained_runs import planned_traffic, sent_in_a_step
from tests.parity.training.lora.test_lora import adapter, lora_job
from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tests.support.training.runs import records, train
from tests.support.training.training_step import furthest
from tllm.planner.cluster.device import LinkSpeed
from tllm.planner.cost.flops import attention_flops, layer_flops, training_flops
from tllm.planner.cost.rank_work import ProjectionFacts, forward_only_layers
from tllm.planner.cost.traffic import step_traffic
from tllm.planner.memory.training_memory import training_bytes
from tllm.planner.simulate.training_step import predict_step
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.data.batch_tensors import Tokens
from tllm.training.job.job_parts import training_facts
from tllm.training.job.lora_job import LoraJob
from tllm.training.job.target_modules import lowest_learned_layer
from tllm.training.step import rank_model
from tllm.training.step.pipeline_step import StepResult
from tllm.training.trainer import RankTrainer

RANK, LOWEST, SPEED = 3, 2, 1e9
LATE = LoraJob(r=RANK, target_modules=("q_proj",), layers_to_transform=(LOWEST, 3))
EVERY = LoraJob(r=RANK, target_modules=("q_proj",))
PRODUCTS = ("mm", "addmm")


class Counted:
    """The flops of linears' products in the passes of all stages, and the microbatches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flops, self.batches, lock, run_schedule = 0, list[Tokens](), Lock(), rank_model.run_schedule

        def counted(schedule: Any, stage: Any, microbatches: Any, loss_scale: float) -> StepResult:
            with FlopCounterMode(display=False) as mode:
                result = run_schedule(schedule, stage, microbatches, loss_scale)
            with lock:
                of_each = mode.get_flop_counts()["Global"]
                self.flops += sum(count for kind, count in of_each.items() if str(kind).split(".")[-1] in PRODUCTS)
                self.batches += microbatches if stage.index == 0 else ()
            return result

        monkeypatch.setattr(rank_model, "run_schedule", counted)


def products(spec: ModelSpec, tokens: Tokens, lowest: int) -> int:
    """Flops of linears' products of a microbatch, forward and backward, as the planner counts them; and what it leaves
    out: the adapter's own, and that inputs of the lowest adapted layer want no gradient."""
    (whole,) = cut_stage(spec, (1,))
    lengths, layers = tokens.lengths, spec.layers
    core = sum(attention_flops(spec, layer, whole, lengths) for layer in layers)
    late = sum(attention_flops(spec, layer, whole, lengths) for layer in layers[lowest:])
    counted = training_flops(spec, lengths, tokens.predicted, is_frozen=True, forward_only=lowest) - core - 2 * late
    T, D, heads = sum(lengths), spec.hidden_size, spec.num_heads * spec.head_dim
    of_adapter = sum(2 * T * RANK * (3 * heads + (2 + (n > lowest)) * D) for n in range(lowest, spec.num_layers))
    of_inputs = 2 * T * D * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return counted + of_adapter - of_inputs


@pytest.mark.parametrize(("lora", "lowest"), [(LATE, LOWEST), (EVERY, 0)])
@pytest.mark.parametrize("plan", ["pp=1,recompute=selective", "pp=2", "pp=4,schedule=gpipe", "pp=2,chunks=2"])
def test_the_flops_of_a_run_are_those_that_are_counted(
    plan: str, lora: LoraJob, lowest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("llama", tmp_path / "model")
    spec, counted = spec_of(tmp_path / "model"), Counted(monkeypatch)
    train(lora_job(tmp_path / "model", tmp_path / "run", lora=lora, max_steps=1), plan)
    assert len(counted.batches) == 4
    assert counted.flops == sum(products(spec, tokens, lowest) for tokens in counted.batches)


@pytest.mark.parametrize("plan", ["pp=4,schedule=zero_bubble", "pp=2,tp=2", "pp=2,chunks=2", "tp=2,sequence=true"])
def test_a_run_sends_what_is_planned_and_learns_the_same(plan: str, tmp_path: Path) -> None:
    """Some thousand bytes of rows and of numbers of each step come beside."""
    save_model("llama", tmp_path / "model", hidden_size=192, num_attention_heads=8)
    spec, sent, planned = spec_of(tmp_path / "model"), list[int](), list[int]()
    for number, lora in enumerate((EVERY, LATE)):
        job = lora_job(
            tmp_path / "model", tmp_path / f"run{number}", lora=lora, max_steps=2, packing=True, shuffle=False
        )
        sent.append(records(train(job, plan))[-1].bytes_sent)
        planned.append(sum(one.total for one in step_traffic(spec, Plan.parse(plan, 4), training_facts(job))))
    train(job := lora_job(tmp_path / "model", tmp_path / "one", lora=LATE, max_steps=2, packing=True), "pp=1")
    off, name = furthest(adapter(tmp_path / "run1"), adapter(Path(job.output_dir)))
    assert off < 1e-11, name
    assert planned[0] - planned[1] == pytest.approx(sent[0] - sent[1], rel=0.05)
    assert planned[1] < 0.9 * planned[0]


HALVES = {
    "attention": (("q_proj", "down_proj"), 3),
    "the last of attention": (("o_proj",), 3),
    "the MLP": (("gate_proj", "down_proj"), 2),
    "the last of the MLP": (("down_proj",), 2),
}
"""Targets of the lowest adapted layer, and the sums of hidden states that it makes with them: two in the forward pass,
and one of the gradient at the MLP's input, if that is not the lowest of what learns."""


@pytest.mark.parametrize("plan", ["tp=2", "tp=2,recompute=layer", "tp=3,sequence=true", "pp=2,tp=2", "tp=2,cp=2"])
@pytest.mark.parametrize(("case", "lowest"), [("attention", 0), *((case, LOWEST) for case in HALVES)])
def test_no_gradient_is_summed_below_the_lowest_adapted_linear(
    case: str, lowest: int, plan: str, tmp_path: Path
) -> None:
    """Whole rows are sent over `tp`, and beside them some numbers of each token and step."""
    save_model("llama", tmp_path / "model", hidden_size=192)
    targets, sums = HALVES[case]
    rows, spec, trainers = tmp_path / "full.jsonl", spec_of(tmp_path / "model"), list[RankTrainer]()
    rows.write_text("".join(json.dumps({"input_ids": [*range(1, 25)]}) + "\n" for _ in range(8)))
    layers = tuple(range(lowest, spec.num_layers))
    lora = LoraJob(r=RANK, target_modules=targets, layers_to_transform=layers)
    job = lora_job(tmp_path / "model", tmp_path / "run", lora=lora, max_steps=2, train_files=(str(rows),))
    train(job, plan, damage=trainers.append)
    parsed, facts = Plan.parse(plan, spec.num_layers), training_facts(job)
    planned = planned_traffic(spec, parsed, facts)
    assert len(trainers) == parsed.world_size
    a_sum = facts.microbatches * facts.seq_len * spec.hidden_size * facts.item_bytes / parsed.cp
    for trainer in trainers:
        assert sent_in_a_step(trainer, "tp") == pytest.approx(planned[trainer.config.rank].tp, abs=0.1 * a_sum)
    if plan == "tp=2":
        whole = sums + 4 * (spec.num_layers - 1 - lowest) + 2 * lowest + 1  # and the embedding's; the head has few
        assert planned[0].tp / a_sum == pytest.approx(whole + 1, rel=0.05)


@pytest.mark.parametrize("plan", ["pp=2", "tp=2"])
def test_of_gradients_those_of_an_adapter_alone_are_summed_in_a_replica(plan: str, tmp_path: Path) -> None:
    """Not those of a table that two stages hold; of linears that are cut those of A or of B."""
    save_model("llama", tmp_path / "model", hidden_size=192, tie_word_embeddings=True)
    spec, sent, planned = spec_of(tmp_path / "model"), list[int](), list[int]()
    for rank in (2, 16):
        lora = LoraJob(r=rank, target_modules=("gate_proj", "down_proj"))
        job = lora_job(tmp_path / "model", tmp_path / f"run{rank}", lora=lora, max_steps=2, packing=True, shuffle=False)
        sent.append(records(train(job, plan))[-1].bytes_sent)
        planned.append(sum(one.total for one in step_traffic(spec, Plan.parse(plan, 4), training_facts(job))))
    assert planned[1] - planned[0] == sent[1] - sent[0]
    assert (sent[0] < sent[1]) == (plan == "tp=2")
    if plan == "pp=2":
        assert planned == pytest.approx(sent, rel=1e-3)


@pytest.mark.parametrize("plan", ["pp=1", "pp=2", "pp=4,schedule=zero_bubble", "pp=2,chunks=2", "pp=2,recompute=layer"])
def test_seconds_and_memory_are_those_of_passes_that_are_run(plan: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    spec, parsed = spec_of(tmp_path), Plan.parse(plan, 4)
    (whole,) = cut_stage(spec, (1,))
    held = list[int]()
    for lora, lowest in ((LATE, LOWEST), (EVERY, 0)):
        job = lora_job(tmp_path, tmp_path / "run", lora=lora)
        facts = training_facts(job)
        assert forward_only_layers(spec, facts) == lowest_learned_layer(job, spec) == lowest
        step = predict_step(spec, parsed, facts, SPEED, LinkSpeed())
        assert step.timeline is not None
        learning = spec.layers[lowest:]
        flops = training_flops(spec, facts.lengths, is_frozen=True, forward_only=lowest)
        if parsed.recompute == "layer":
            flops += sum(layer_flops(spec, layer, whole, facts.lengths) for layer in learning)
        assert sum(step.timeline.busy) == pytest.approx(facts.microbatches * flops / SPEED)
        held.append(sum(rank.activations for rank in training_bytes(spec, parsed, facts)))
    assert held[0] < 0.7 * held[1]


def test_what_is_learned_of_hidden_states_may_lie_below(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    facts = training_facts(lora_job(tmp_path, tmp_path / "run", lora=LATE))
    assert forward_only_layers(spec_of(tmp_path), replace(facts, projections=ProjectionFacts((1,), 8))) == 0
