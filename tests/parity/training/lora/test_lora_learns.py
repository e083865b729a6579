"""An adapter learns what the whole model learns: text that the tiny model has never seen, to nearly the same loss."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.house.tree import ROOT
from tests.support.training.runs import records, train
from tllm.training.job.job import Job
from tllm.training.job.lora_job import LoraJob

TINY = ROOT / "models" / "tiny"
STEPS, BATCH, SEQ_LEN, LAST = 120, 8, 128, 20
NAMES = (
    *("Ada", "Bela", "Cyrus", "Dora", "Emil", "Frida", "Goran", "Hanna"),
    *("Ivo", "Jana", "Kemal", "Lena", "Milan", "Nora", "Otto", "Petra"),
)
PLACES = (
    *("harbour", "mill", "chapel", "market", "bridge"),
    *("garden", "tower", "cellar", "orchard", "station"),
)
THINGS = (
    *("lantern", "map", "violin", "kettle", "compass", "letter"),
    *("basket", "ladder", "mirror", "drum", "saddle", "anchor"),
)
DAYS = (
    *("Monday", "Tuesday", "Wednesday", "Thursday"),
    *("Friday", "Saturday", "Sunday"),
)


def letters(path: Path, count: int, seed: int = 5) -> Path:
    """Short letters in one manner, by chance of names, places, things and sums: no two rows are the same."""
    dice = random.Random(seed)
    lines = []
    for number in range(count):
        a, b = dice.sample(NAMES, 2)
        thing, other = dice.sample(THINGS, 2)
        price, paid = dice.randint(10, 60), dice.randint(60, 99)
        text = (
            f"Letter {number}. Dear {b}, on {dice.choice(DAYS)} I left the {thing} at the {dice.choice(PLACES)}. "
            f"It cost {price} crowns; I gave {paid} and was given back {paid - price}. "
            f"Bring the {other} to the {dice.choice(PLACES)}, not the {thing}. Yours, {a}."
        )
        lines.append(json.dumps({"text": text}) + "\n")
    path.write_text("".join(lines))
    return path


def last_loss(folder: Path, rows: Path, **more: Any) -> tuple[float, float]:
    """The loss of the first step, and the mean of the last ones: all of rows that were not learned before."""
    fields = dict(
        model_name_or_path=str(TINY), train_files=(str(rows),), output_dir=str(folder), max_steps=STEPS,
        seq_len=SEQ_LEN, global_batch_size=BATCH, microbatch_size=BATCH, lr_scheduler_type="cosine", warmup_steps=5,
        save_steps=STEPS, seed=7,
    )  # fmt: skip
    found = records(train(Job(**{**fields, **more}), "pp=1"))
    return found[0].loss, sum(record.loss for record in found[-LAST:]) / LAST


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_an_adapter_comes_within_two_percent_of_the_loss_of_the_whole_model(tmp_path: Path) -> None:
    """At the best of the rates that were tried for each (docs/log/training.md)."""
    torch.set_num_threads(1)
    rows = letters(tmp_path / "letters.jsonl", STEPS * BATCH * 2)
    first, whole = last_loss(tmp_path / "whole", rows, learning_rate=2e-3)
    lora = LoraJob(r=32, lora_alpha=64.0)
    first_adapted, adapted = last_loss(tmp_path / "adapter", rows, learning_rate=1e-2, lora=lora)
    print(f"first {first:.4f}, whole model {whole:.4f}, adapter {adapted:.4f}: {adapted / whole - 1:+.2%}")
    assert abs(first - first_adapted) < 1e-5 * first, "an adapter begins as nothing"
    assert whole < 0.5 * first, "there is something to learn"
    assert adapted < 1.02 * whole
