"""A student and a deeper teacher of the same sixteen characters, and prompts with completions beside them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.support.models.families import save_model
from tests.support.training.post_training.policy_task import CHARACTERS, write_tokenizer
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job

K = 6


def write_models(folder: Path) -> None:
    """`student`, `teacher`, which is deeper, and `rows.jsonl`."""
    sizes = dict(vocab_size=len(CHARACTERS) + 1, eos_token_id=0, bos_token_id=None)
    save_model("llama", folder / "student", num_hidden_layers=2, **sizes)
    save_model("llama", folder / "teacher", seed=5, num_hidden_layers=3, **sizes)
    for name in ("student", "teacher"):
        write_tokenizer(folder / name)
    dice = random.Random(3)
    rows = [
        {"prompt": f"{number}=", "completion": "".join(dice.choices("ab()", k=dice.randint(1, 9)))}
        for number in range(40)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def on_policy_job(folder: Path, run: Path, **more: Any) -> Job:
    """A short job in float64; half of the steps learn from the student's own completions unless `distill` says more."""
    run.parent.mkdir(parents=True, exist_ok=True)
    keys = {
        "teacher_model_name_or_path": str(folder / "teacher"),
        "teacher_dtype": "float64",
        "top_k": K,
        "lmbda": 0.5,
        "max_completion_length": 8,
        **more.pop("distill", {}),
    }
    fields: dict[str, Any] = dict(
        model_name_or_path=str(folder / "student"),
        train_files=(str(folder / "rows.jsonl"),),
        output_dir=str(run),
        task="distill",
        distill=DistillationKeys(**keys),
        max_steps=6,
        seq_len=16,
        global_batch_size=8,
        microbatch_size=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        shuffle=False,
        save_steps=2,
        mirror_steps=0,
        seed=12,
        dtype="float64",
    )
    return Job(**{**fields, **more})
