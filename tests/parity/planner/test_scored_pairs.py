"""A run that trains a reward model sends and holds what is planned: scores where others have logits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.parity.planner.trained_runs import planned_traffic, sent_in_a_step, watch_peaks
from tests.support.training.post_training.preferences import preference_job, small_model, text_of
from tests.support.training.runs import train
from tllm.planner.memory.training_memory import training_bytes
from tllm.spec.plan import Plan
from tllm.training.job.initial_model import row_lengths, spec_of
from tllm.training.job.job import Job
from tllm.training.job.job_parts import training_facts
from tllm.training.trainer import RankTrainer

PROMPT, REPLY, SEQ_LEN = 5, 12, 48


def even_pairs(tmp_path: Path, seq_len: int, reply: int, **model: Any) -> Job:
    """Pairs of equal lengths."""
    small_model("llama", tmp_path / "model", **model)
    dice, lines = random.Random(5), list[str]()
    for _ in range(16):
        prompt, *replies = ([dice.randrange(99) for _ in range(count)] for count in (PROMPT, reply, reply))
        chosen, rejected = (f" {text_of(reply)}" for reply in replies)
        lines.append(json.dumps({"prompt": text_of(prompt), "chosen": chosen, "rejected": rejected}) + "\n")
    (tmp_path / "pairs.jsonl").write_text("".join(lines))
    return preference_job(tmp_path / "model", tmp_path / "run", "reward", max_steps=2, seq_len=seq_len)


@pytest.mark.parametrize("plan", ["tp=2", "tp=2,sequence=true", "pp=2,tp=2"])
def test_a_run_sends_what_is_planned(plan: str, tmp_path: Path) -> None:
    job, trainers = even_pairs(tmp_path, SEQ_LEN, REPLY, hidden_size=96), list[RankTrainer]()
    train(job, plan, damage=trainers.append)
    spec, facts = spec_of(job), training_facts(job, lengths=row_lengths(job))
    parsed = Plan.parse(plan, spec.num_layers)
    assert sum(facts.lengths) == 2 * (PROMPT + REPLY + 1) < SEQ_LEN
    planned = planned_traffic(spec, parsed, facts)
    for trainer in trainers:
        assert sent_in_a_step(trainer, "tp") == pytest.approx(planned[trainer.config.rank].tp, rel=0.01, abs=1024)


def test_a_run_takes_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose logits would be a third of it, and whose rows are full."""
    peaks = watch_peaks(monkeypatch)
    job = even_pairs(tmp_path, 2 * (PROMPT + 140 + 1), 140, num_hidden_layers=1, vocab_size=300)
    train(job, "pp=1")
    (rank,) = training_bytes(spec_of(job), Plan.parse("pp=1", 1), training_facts(job))
    kept = rank.activations + rank.logits
    assert kept <= peaks[-1] <= kept + rank.working
