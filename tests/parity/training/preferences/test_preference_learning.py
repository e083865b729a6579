"""What is learned from preferences holds for rows held out: DPO and its kin raise margins, a reward model ranks."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.selection import soak_but
from tests.support.training.post_training.preferences import preference_job, small_model
from tests.support.training.runs import records, train

SEED = 7


def tasteful_rows(path: Path, count: int, seed: int, paired: bool) -> Path:
    """Replies of random words; a wanted one has more words below 20, an unwanted one more above."""
    dice = random.Random(seed)

    def reply(wanted: bool) -> str:
        low, high = (0, 20) if wanted else (60, 99)
        return "".join(
            f" w{dice.randrange(low, high) if dice.random() < 0.7 else dice.randrange(99)}" for _ in range(5)
        )

    rows = []
    for _ in range(count):
        prompt = " ".join(f"w{dice.randrange(99)}" for _ in range(3))
        label = dice.random() < 0.5
        both = {"chosen": reply(True), "rejected": reply(False)}
        rows.append({"prompt": prompt, **(both if paired else {"completion": reply(label), "label": label})})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("task", soak_but(["dpo", "reward"], ["dpo", "kto", "orpo", "simpo", "reward"]))
def test_rows_held_out_are_judged_right(task: str, tmp_path: Path) -> None:
    print("seed", SEED)
    small_model("llama", tmp_path / "model", num_hidden_layers=2)
    paired = task != "kto"
    files = [tasteful_rows(tmp_path / f"{n}.jsonl", n, SEED + n, paired) for n in (160, 40)]
    job = preference_job(
        tmp_path / "model",
        tmp_path / "run",
        task,
        train_files=(str(files[0]),),
        eval_files=(str(files[1]),),
        eval_steps=30,
        max_steps=30,
        optimizer="adamw",
        learning_rate=2e-3,
        dtype="float32",
    )
    of_one = replace(job, output_dir=str(tmp_path / "one"), max_steps=1, eval_steps=1)
    first, last = (records(train(one, "pp=1"))[-1].eval_metrics or {} for one in (of_one, job))
    print({name: (round(first[name], 3), round(last[name], 3)) for name in last})
    if task == "kto":
        assert last["rewards/chosen"] > last["rewards/rejected"] + 0.1
        return
    accuracy, margin = ("accuracy", "margin") if task == "reward" else ("rewards/accuracies", "rewards/margins")
    least = 0.9 if task in ("dpo", "reward") else 0.8  # without a reference, replies that were likely before stay so
    assert last[accuracy] > least > first[accuracy] and last[margin] > first[margin]
