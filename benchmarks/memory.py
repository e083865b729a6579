"""Memory of training against its prediction, in other shapes than the planner's: `python benchmarks/memory.py`.

Wide and narrow layers, long rows, vocabularies that are short and long, tied and not, under plans for one and two
processes of this machine. Each is new, has one thread, and takes eight steps, all saved.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from report import write

sys.path.append(str(Path(__file__).parents[1]))

from tests.support.small_job import CONFIG, write_job
from tllm.cli.display.tables import table
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.memory.training_memory import training_bytes
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan
from tllm.train.report.metrics import read_records

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
    """Bytes of the rank with the most."""
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
    lines = [["shape", "plan", "predicted MiB", "measured MiB", "error"]]
    for name, shape in SHAPES.items():
        for text in (*PLANS, "dp=2 with copies of each step"):
            mirrored = text.endswith("step")
            spec, plan = spec_from_config(shape.config), Plan.parse(text.split()[0], shape.config["num_hidden_layers"])
            facts = TrainingFacts(shape.length, ROWS, SIZE, shape.dtype, mirror_steps=int(mirrored))
            predicted = max(rank.total for rank in training_bytes(spec, plan, facts))
            found = measured(shape, text.split()[0], plan.world_size, int(mirrored))
            error = found / predicted - 1
            raw[f"{name}: {text}"] = {"predicted": predicted, "measured": found, "error": error}
            lines.append(
                [name, text, f"{predicted / 2**20:.0f}", f"{found / 2**20:.0f}", f"{100 * error:+.1f} %"],
            )
            print(*lines[-1], flush=True)
    errors = [one["error"] for one in raw.values()]
    within, above = sum(abs(error) <= 0.05 for error in errors), sum(error > 0 for error in errors)
    notes = (
        f"Measured was {100 * min(errors):+.1f} to {100 * max(errors):+.1f} % beside what was predicted, "
        f"{within} of {len(errors)} within 5 %, {above} above."
    )
    write("memory", "Memory of training, predicted and measured", f"```\n{table(lines)}\n```", raw, notes)


if __name__ == "__main__":
    main()
