"""A language of letters that small models learn in a minute, and what students of it are compared by."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.support.training.post_training.policy_task import CHARACTERS, CONFIG, write_tokenizer
from tllm.training.job.job import Job

PROMPT, REPLY = 4, 12
"""Letters of a prompt, and of what follows it."""

TEACHER, STUDENT = 48, 32
"""Widths: the teacher has 2.2 times as many weights."""

FEW = 60
"""Texts of which a student learns where they are few."""

Language = Mapping[tuple[str, str], tuple[list[str], list[float]]]


def of_one_letter(seed: int) -> Language:
    """What comes next hangs on the last letter: each may, some often."""
    dice = random.Random(seed)
    after = {b: [dice.expovariate(1) ** 2 for _ in CHARACTERS] for b in CHARACTERS}
    return {(a, b): (list(CHARACTERS), after[b]) for a in CHARACTERS for b in CHARACTERS}


def of_two_letters(seed: int) -> Language:
    """What comes next hangs on the last two letters: either of two may, equally often."""
    dice = random.Random(seed)
    return {(a, b): (dice.sample(CHARACTERS, 2), [1.0, 1.0]) for a in CHARACTERS for b in CHARACTERS}


def write_texts(path: Path, tongue: Language, count: int, seed: int, prompts: Sequence[str] = ()) -> Path:
    """Rows of prompts, those that are given in turn or new ones, and completions."""
    dice, lines = random.Random(seed), []
    for number in range(count):
        text = list(prompts[number % len(prompts)]) if prompts else dice.choices(CHARACTERS, k=2)
        while len(text) < PROMPT + REPLY:
            text += dice.choices(*tongue[text[-2], text[-1]])
        lines.append(json.dumps({"prompt": "".join(text[:PROMPT]), "completion": "".join(text[PROMPT:])}))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_shape(folder: Path, width: int) -> Path:
    """Config and tokenizer of a model of two layers."""
    folder.mkdir(parents=True)
    write_tokenizer(folder)
    sizes = dict(hidden_size=width, intermediate_size=2 * width, num_key_value_heads=4)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **sizes}))
    return folder


def language_job(begin: Path, run: Path, rows: Path, steps: int, **more: Any) -> Job:
    """Over the texts, from the weights in `begin` or, where it has none, from random ones."""
    if (begin / "model.safetensors").exists():
        model: dict[str, Any] = dict(model_name_or_path=str(begin))
    else:
        model = dict(config_name=str(begin / "config.json"), tokenizer_name=str(begin / "tokenizer.json"))
    fields: dict[str, Any] = dict(
        train_files=(str(rows),),
        output_dir=str(run),
        max_steps=steps,
        seq_len=PROMPT + REPLY,
        global_batch_size=32,
        microbatch_size=32,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        packing=False,
        add_eos=False,
        save_steps=steps,
        mirror_steps=0,
        **model,
    )
    return Job(**{**fields, **more})


def opened(folder: Path) -> transformers.PreTrainedModel:
    """By `transformers`, which shares nothing with what trained it."""
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return model


def ids_of(folder: Path, rows: Path) -> Tensor:
    """The texts of the rows as ids, [rows, PROMPT + REPLY]."""
    ids = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    lines = map(json.loads, rows.read_text().splitlines())
    return torch.tensor([[ids[letter] for letter in row["prompt"] + row["completion"]] for row in lines])


def is_of(tongue: Language, text: str) -> bool:
    """Whether each letter of a whole text, after its prompt, may follow the two before it."""
    places = range(PROMPT, PROMPT + REPLY)
    return len(text) == places.stop and all(text[at] in tongue[text[at - 2], text[at - 1]][0] for at in places)


@torch.no_grad()
def text_loss(model: transformers.PreTrainedModel, ids_BT: Tensor) -> float:
    """Cross-entropy of the replies, nats a token."""
    return float(
        F.cross_entropy(model(ids_BT[:, :-1]).logits[:, PROMPT - 1 :].flatten(0, 1), ids_BT[:, PROMPT:].flatten())
    )
