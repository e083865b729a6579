"""Short letters in one manner, which the tiny model has never seen; and jobs over them, of the whole model or of an
adapter."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.house.tree import ROOT
from tllm.training.job.job import Job
from tllm.training.job.lora_job import LoraJob

TINY = ROOT / "models" / "tiny"
STEPS, BATCH, SEQ_LEN = 120, 8, 128

WHOLE: dict[str, Any] = dict(learning_rate=2e-3)
ADAPTER: dict[str, Any] = dict(learning_rate=1e-2, lora=LoraJob(r=32, lora_alpha=64.0))
"""Each at the best of the rates that were tried for it (docs/log/training.md)."""

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


def write_letters(path: Path, count: int, seed: int = 5) -> Path:
    """By chance of names, places, things and sums: no two rows are the same."""
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


def letters_job(rows: Path, run: Path, **more: Any) -> Job:
    """The tiny model over the letters."""
    fields: dict[str, Any] = dict(
        model_name_or_path=str(TINY), train_files=(str(rows),), output_dir=str(run), max_steps=STEPS,
        seq_len=SEQ_LEN, global_batch_size=BATCH, microbatch_size=BATCH, lr_scheduler_type="cosine", warmup_steps=5,
        save_steps=STEPS, seed=7,
    )  # fmt: skip
    return Job(**{**fields, **more})
