"""What is learned from preferences holds for rows held out: DPO and its kin raise margins, a reward model ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.selection import soak_but
from tests.support.training.post_training.preferences import preference_job, small_model
from tests.support.training.post_training.tastes import write_tasteful_rows
from tests.support.training.runs import records, train

SEED = 7


@pytest.mark.slow
@pytest.mark.parametrize("task", soak_but(["dpo", "reward"], ["dpo", "kto", "orpo", "simpo", "reward"]))
def test_rows_held_out_are_judged_right(task: str, tmp_path: Path) -> None:
    print("seed", SEED)
    small_model("llama", tmp_path / "model", num_hidden_layers=2)
    paired = task != "kto"
    files = [write_tasteful_rows(tmp_path / f"{n}.jsonl", n, SEED + n, paired) for n in (160, 40)]
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
