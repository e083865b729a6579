"""Adapters that learn from preferences: what they are held to is the model without them."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.training.post_training.preferences import preference_job, small_model
from tests.support.training.runs import records, train
from tests.support.training.training_step import furthest
from tllm.training.evaluation.reference_file import FILE
from tllm.training.job.lora_job import LoraJob

LORA = LoraJob(r=4, lora_alpha=8.0, lora_dropout=0.1)
STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    small_model("llama", folder, num_hidden_layers=2)
    return folder


@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_the_reference_is_the_model_without_its_adapter(task: str, model: Path, tmp_path: Path) -> None:
    """That of the whole model's run, which both begin from. The adapter then learns, the same under another plan."""
    whole = preference_job(model, tmp_path / "whole", task, max_steps=STEPS)
    adapted = preference_job(model, tmp_path / "adapted", task, max_steps=STEPS, lora=LORA, learning_rate=1e-2)
    train(whole, "pp=1")
    got = records(train(adapted, "pp=1"))
    wanted = load_file(tmp_path / "whole" / FILE)["train.log_probs"]
    reference = load_file(tmp_path / "adapted" / FILE)["train.log_probs"]
    assert (reference - wanted).abs().max() < 1e-11
    if task == "dpo":
        assert got[0].loss == pytest.approx(math.log(2), abs=1e-12), "policy and reference are the same at first"
    assert got[-1].loss < got[0].loss
    other = preference_job(model, tmp_path / "other", task, max_steps=STEPS, lora=LORA, learning_rate=1e-2)
    steps = itertools.count(1)
    first = train(other, "dp=2,tp=2", lambda: next(steps) >= 2)
    found = records([*first, *train(other, "pp=2")])
    assert [one.step for one in found] == list(range(1, STEPS + 1))
    assert max(abs(a.loss - b.loss) for a, b in zip(found, got, strict=True)) < 1e-11
    name = "final/adapter_model.safetensors"
    off, where = furthest(load_file(tmp_path / "other" / name), load_file(tmp_path / "adapted" / name))
    assert off < 1e-9, where
