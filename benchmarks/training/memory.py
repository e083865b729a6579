"""Memory of training, predicted and measured: `python -m benchmarks.training.memory`.

Five models with wide and narrow layers, long rows, small and large vocabularies, tied and untied embeddings, under
plans for one and two processes of this machine. Each run has new processes of one thread and takes eight steps, all
saved.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import markdown
from benchmarks.report.markdown import percent
from benchmarks.report.results import Page, write
from tests.support.training.small_job import CONFIG, write_job
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.memory.training_memory import training_bytes
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan
from tllm.training.report.metrics import read_records

ROWS, SIZE, STEPS = 8, 2, 8


class Shape(NamedTuple):
    """Rows of `length` tokens through `config`, in numbers of `dtype`."""

    config: dict[str, Any]
    length: int
    dtype: str = "float32"


def llama(width: int, inner: int, layers: int, vocabulary: int, tied: bool = True) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return {**CONFIG, **sizes, "num_attention_heads": width // 64, "tie_word_embeddings": tied}


SHAPES = {
    "width 256, 1,024 words, rows of 512": Shape(llama(256, 688, 6, 1024), 512),
    "width 512, 8,192 words, rows of 256": Shape(llama(512, 1376, 6, 8192), 256),
    "the same in bfloat16": Shape(llama(512, 1376, 6, 8192), 256, "bfloat16"),
    "width 384, 32,000 words, rows of 128": Shape(llama(384, 1024, 8, 32000), 128),
    "the same, not tied": Shape(llama(384, 1024, 8, 32000, tied=False), 128),
}
PLANS = (
    "pp=1",
    "pp=1,recompute=layer",
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=3",
    "tp=2",
    "pp=2",
    "pp=2,schedule=zero_bubble",
)


def measured(shape: Shape, plan: str, ranks: int, mirror_steps: int) -> int:
    """Peak bytes of the rank that has the most."""
    with tempfile.TemporaryDirectory() as place:
        keys = {"seq_len": shape.length, "global_batch_size": ROWS, "microbatch_size": SIZE, "dtype": shape.dtype}
        keys |= {"max_steps": STEPS, "save_steps": 1, "mirror_steps": mirror_steps}
        job = write_job(Path(place), {**shape.config, "torch_dtype": shape.dtype}, **keys)
        words = ["train", str(job), "--local", str(ranks), "--plan", plan, "--threads", "1", "--quiet"]
        subprocess.run([sys.executable, "-m", "tllm.cli", *words], check=True, capture_output=True)
        return max(record.memory or 0 for record in read_records(Path(place) / "run" / "metrics.jsonl"))


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    raw: dict[str, dict[str, float]] = {}
    for name, shape in SHAPES.items():
        for text in (*PLANS, "dp=2 with copies of each step"):
            mirrored = text.endswith("step")
            spec, plan = spec_from_config(shape.config), Plan.parse(text.split()[0], shape.config["num_hidden_layers"])
            facts = TrainingFacts(shape.length, ROWS, SIZE, shape.dtype, mirror_steps=int(mirrored))
            predicted = max(rank.total for rank in training_bytes(spec, plan, facts))
            found = measured(shape, text.split()[0], plan.world_size, int(mirrored))
            error = found / predicted - 1
            raw[f"{name}: {text}"] = {"predicted": predicted, "measured": found, "error": error}
            print(name, text, predicted, found, percent(error, sign=True), flush=True)
    write(page(raw), raw)


PURPOSE = """Whether a training run takes the memory that `tllm train --dry-run` predicts, so that a plan which is said
to fit does fit. Five models of other shapes than that of benchmarks/planner, under nine plans for one and two
processes. Each process is new, has one thread and takes eight steps of 8 rows in microbatches of 2, each step saved."""
READING = """Cells are the peak MiB of the rank that takes the most, and how far that is above the prediction (below:
-). Measured was {least} to {most} beside what was predicted, {within} of {count} within 5 %, {above} above."""
LIMITS = """- A prediction that is too low lets a plan be chosen that does not fit: {above} of {count} are above, by
  {most} at worst.
- Small models on one machine, on which the libraries' own memory weighs much."""
SHORT = {"dp=2 with copies of each step": "dp=2, copies of each step"}


def page(raw: dict[str, dict[str, float]]) -> Page:
    """The page of raw figures: predicted and measured bytes under `MODEL: PLAN`."""
    cells: dict[str, dict[str, str]] = {}
    for name, one in raw.items():
        shape, plan = name.rsplit(": ", 1)
        cells.setdefault(plan, {})[shape] = f"{one['measured'] / 2**20:.0f} ({percent(one['error'], sign=True)})"
    shapes = list(next(iter(cells.values())))
    rows = [
        ["plan", *shapes],
        *([SHORT.get(plan, plan), *(of[shape] for shape in shapes)] for plan, of in cells.items()),
    ]
    errors = [one["error"] for one in raw.values()]
    numbers = {
        "least": percent(min(errors), sign=True),
        "most": percent(max(errors), sign=True),
        "within": sum(abs(error) <= 0.05 for error in errors),
        "above": sum(error > 0 for error in errors),
        "count": len(errors),
    }
    title, limits = "Memory of training, predicted and measured", LIMITS.format(**numbers)
    return Page("training", "memory", title, PURPOSE, markdown.table(rows), READING.format(**numbers), limits)


if __name__ == "__main__":
    main()
