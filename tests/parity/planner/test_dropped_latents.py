"""Where an adapter of `kv_b_proj` has dropout, attention is wider by the dropped latents, in runs and in plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.parity.planner.trained_runs import planned_traffic, sent_in_a_step, watch_peaks
from tests.parity.training.lora.test_lora import lora_job
from tests.support.models.families import save_model
from tests.support.models.layouts import spec_of
from tests.support.training.runs import train
from tllm.planner.cluster.device import LinkSpeed
from tllm.planner.cost.flops import BACKWARD
from tllm.planner.memory.training_memory import training_bytes
from tllm.planner.simulate.training_step import predict_step
from tllm.spec.plan import Plan
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.job.job import Job
from tllm.training.job.job_parts import training_facts
from tllm.training.job.lora_job import LoraJob
from tllm.training.trainer import RankTrainer

TOKENS, SPEED = 48, 1e9
DROPPED = LoraJob(r=2, lora_dropout=0.2, target_modules=("kv_b_proj",))
KINDS = {
    "dropped": DROPPED,
    "late": replace(DROPPED, layers_to_transform=(2, 3)),
    "whole": replace(DROPPED, lora_dropout=0.0),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("deepseek_v3_moe", folder)
    return folder


def full_job(model: Path, run: Path, lora: LoraJob) -> Job:
    """Rows of one document that fills them."""
    run.parent.mkdir(exist_ok=True)
    rows = run.parent / "full.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": [*range(1, TOKENS + 1)]}) + "\n" for _ in range(8)))
    job: Job = lora_job(model, run, lora=lora, max_steps=2, seq_len=TOKENS, train_files=(str(rows),))
    return job


@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_sends_keys_as_wide_as_they_are(kind: str, model: Path, tmp_path: Path) -> None:
    job, trainers, plan = full_job(model, tmp_path / "run", KINDS[kind]), list[RankTrainer](), Plan.parse("cp=2", 4)
    train(job, "cp=2", damage=trainers.append)
    spec, facts = spec_of(model), training_facts(job)
    planned = planned_traffic(spec, plan, facts)
    for trainer in trainers:
        assert sent_in_a_step(trainer, "cp") == pytest.approx(planned[trainer.config.rank].cp, rel=0.01)


@pytest.mark.parametrize("kind", ["dropped", "late"])
def test_attention_takes_as_long_as_it_is_wide(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the widths of queries that a run's attention gets, layer by layer, forward and backward."""
    widths, call = dict[int, set[int]](), TrainAttend.__call__

    def watched(attend: TrainAttend, layer: int, q_TNH: Any, *others: Any) -> Any:
        widths.setdefault(layer, set()).add(q_TNH.shape[-1])
        return call(attend, layer, q_TNH, *others)

    monkeypatch.setattr(TrainAttend, "__call__", watched)
    spec, plan, lora = spec_of(model), Plan.parse("pp=1", 4), KINDS[kind]
    job = full_job(model, tmp_path / "run", lora)
    train(job, "pp=1")
    facts, without = (training_facts(replace(job, lora=one)) for one in (lora, replace(lora, lora_dropout=0.0)))
    dropped, whole = (predict_step(spec, plan, one, SPEED, LinkSpeed()).compute for one in (facts, without))
    wider = {layer: max(found) - spec.head_dim for layer, found in widths.items()}
    assert spec.latent is not None and set(wider.values()) == {spec.latent.width, *([0] if kind == "late" else [])}
    pairs = TOKENS * (TOKENS + 1) // 2
    flops = (1 + BACKWARD) * 4 * spec.num_heads * sum(wider.values()) * pairs
    assert dropped - whole == pytest.approx(facts.microbatches * flops / SPEED)


def test_memory_is_that_of_columns_that_are_there(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the passes of a run keep more with dropout, masks of some columns among it."""
    peaks = watch_peaks(monkeypatch)
    spec, plan, planned, taken = spec_of(model), Plan.parse("pp=1", 4), list[int](), list[int]()
    for kind in ("dropped", "whole"):
        job = full_job(model, tmp_path / kind, KINDS[kind])
        train(job, "pp=1")
        taken.append(peaks[-1])
        (rank,) = training_bytes(spec, plan, training_facts(job))
        planned.append(rank.activations)
        assert rank.activations + rank.logits + rank.working > taken[-1]
    assert planned[0] - planned[1] == pytest.approx(taken[0] - taken[1], rel=0.12)
