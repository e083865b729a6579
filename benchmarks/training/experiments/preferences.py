"""DPO: margins of pairs held out grow, and what the model writes itself is what the pairs prefer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.training.experiments.runs import Found, evaluated_before, metrics, run, sampled, seeded, write_rows
from tests.support.training.post_training.letter_languages import opened
from tests.support.training.post_training.preferences import EOS, WORDS, preference_job, small_model
from tests.support.training.post_training.tastes import REPLY, is_wanted, prompt, reply, write_tasteful_rows

PAIRS, HELD_OUT, TEXTS, ASKED = 160, 100, 800, 400
STEPS, EVERY = 30, 5


def preferred(seed: int, folder: Path) -> Found:
    """A model that first learned replies of both kinds alike, and then which of two is preferred."""
    small_model("llama", folder / "random", seed=seed, num_hidden_layers=2)
    common: dict[str, Any] = dict(optimizer="adamw", dtype="float32", seed=seed)
    texts = _write_texts(folder / "texts.jsonl", seed)
    run(
        preference_job(
            folder / "random",
            folder / "start",
            "sft",
            train_files=(str(texts),),
            learning_rate=5e-3,
            lr_scheduler_type="cosine",
            max_steps=100,
            global_batch_size=32,
            microbatch_size=32,
            max_grad_norm=1.0,
            **common,
        )
    )
    pairs, held_out = (
        write_tasteful_rows(folder / f"{name}.jsonl", count, 1000 * seed + count, True)
        for name, count in (("pairs", PAIRS), ("held-out", HELD_OUT))
    )
    job = preference_job(
        folder / "start" / "final",
        folder / "preferred",
        "dpo",
        train_files=(str(pairs),),
        eval_files=(str(held_out),),
        eval_steps=EVERY,
        max_steps=STEPS,
        learning_rate=2e-3,
        microbatch_size=8,
        **common,
    )
    before, steps = evaluated_before(job), run(job)
    curves = {
        "margin": metrics("rewards/margins", before, steps),
        "pairs won": metrics("rewards/accuracies", before, steps),
    }
    wanted = [_wanted(opened(folder / name / "final"), seed) for name in ("start", "preferred")]
    return Found(
        {
            "margin before": curves["margin"][0][1],
            "margin": curves["margin"][-1][1],
            "pairs won": curves["pairs won"][-1][1],
            "wanted before": wanted[0],
            "wanted": wanted[1],
        },
        curves,
    )


def _write_texts(path: Path, seed: int) -> Path:
    """Prompts with replies, half of which are wanted."""
    dice = random.Random(seed)
    return write_rows(
        path,
        ({"prompt": prompt(dice), "completion": reply(dice, number % 2 == 0)} for number in range(TEXTS)),
    )


def _wanted(model: transformers.PreTrainedModel, seed: int) -> float:
    """The share of the model's own replies to new prompts that are wanted."""
    dice = random.Random(seed + 500)
    prompts = [[WORDS[word] for word in prompt(dice).split()] for _ in range(ASKED)]
    with seeded(seed):
        replies_BT = sampled(model, torch.tensor(prompts), REPLY, EOS)
    return sum(map(is_wanted, replies_BT.tolist())) / ASKED
