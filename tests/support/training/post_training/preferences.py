"""Rows of preferences over a small vocabulary of words, jobs over them, and plain slow loops over `transformers`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer as Writable
from tokenizers import models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests.support.models.families import save_model
from tllm.training.job.job import Job

EOS = 100
WORDS = {**{f"w{i}": i for i in range(99)}, "<unk>": 99, "<eos>": EOS}

Loss = Callable[[list["Replies"]], Tensor]
"""loss(every row of a step) -> their mean loss."""


def add_tokenizer(folder: Path) -> None:
    """A word for each id, which the tests can count by hand."""
    made = Writable(models.WordLevel(WORDS, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<eos>"])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def small_model(case: str, folder: Path, **more: Any) -> transformers.PreTrainedModel:
    model = save_model(case, folder, **more)
    add_tokenizer(folder)
    return model


def text_of(ids: Sequence[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def some(dice: random.Random, least: int, most: int) -> list[int]:
    return [dice.randrange(99) for _ in range(dice.randint(least, most))]


def pair_rows(path: Path, count: int = 24, seed: int = 1) -> list[dict[str, Any]]:
    """Pairs of random words with lengths of their own, some with a margin."""
    dice = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        row: dict[str, Any] = {
            "prompt": text_of(some(dice, 2, 5)),
            "chosen": " " + text_of(some(dice, 1, 6)),
            "rejected": " " + text_of(some(dice, 1, 6)),
        }
        rows.append({**row, "margin": dice.random()} if number % 3 == 0 else row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def unpaired_rows(path: Path, count: int = 24, seed: int = 2) -> list[dict[str, Any]]:
    dice = random.Random(seed)
    rows = [
        {
            "prompt": text_of(some(dice, 2, 4)),
            "completion": " " + text_of(some(dice, 1, 5)),
            "label": dice.random() < 0.6,
        }
        for _ in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def preference_job(model: Path, run: Path, task: str, **more: Any) -> Job:
    """A short job over the rows beside its folder, in file order and without packing."""
    path = run.parent / ("unpaired.jsonl" if task == "kto" else "pairs.jsonl")
    if not path.exists():
        (unpaired_rows if task == "kto" else pair_rows)(path)
    fields = dict(
        task=task,
        model_name_or_path=str(model),
        train_files=(str(path),),
        output_dir=str(run),
        max_steps=3,
        seq_len=32,
        global_batch_size=8,
        optimizer="sgd",  # whose steps are the gradients themselves
        momentum=0.0,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        shuffle=False,
        packing=False,
        dtype="float64",
    )
    return Job(**{**fields, **more})


class Replies:
    """One row's replies as ids, and the sums and lengths that losses are made of, by a plain forward pass."""

    def __init__(self, row: dict[str, Any], model: Any, reference: dict[str, Tensor]) -> None:
        self.row, self.reference = row, reference
        self.log_probs = {name: log_probs(model, *ids_of(row, row[name])) for name in reference}

    def ratio(self, name: str) -> Tensor:
        return self.log_probs[name].sum() - self.reference[name].sum()


@torch.no_grad()
def references(model: Any, rows: list[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Tensor]]:
    return [{name: log_probs(model, *ids_of(row, row[name])) for name in names} for row in rows]


def ids_of(row: dict[str, Any], reply: str) -> tuple[list[int], list[int]]:
    """(prompt, reply) as ids."""
    return [WORDS[word] for word in row["prompt"].split()], [WORDS[word] for word in reply.split()] + [EOS]


def log_probs(model: Any, prompt: list[int], reply: list[int]) -> Tensor:
    """log p of each token of the reply, from the whole table of log_softmax."""
    ids_T = torch.tensor(prompt + reply)
    table_TV = model(ids_T[None]).logits[0].log_softmax(-1)
    return torch.stack([table_TV[len(prompt) + i - 1, token] for i, token in enumerate(reply)])


def learn(
    job: Job,
    model: Any,
    reference: list[dict[str, Tensor]],
    rows: list[dict[str, Any]],
    loss_of: Loss,
) -> list[float]:
    """The losses of the job's steps by plain gradient descent, over rows in file order; the model is trained."""
    optimizer = torch.optim.SGD(model.parameters(), lr=job.learning_rate)
    losses = []
    for step in range(job.max_steps):
        batch = [i % len(rows) for i in range(step * job.global_batch_size, (step + 1) * job.global_batch_size)]
        loss = loss_of([Replies(rows[i], model, reference[i]) for i in batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def mean_over(pair: Callable[[Replies], Tensor]) -> Loss:
    """The mean of what each row says by itself."""
    return lambda batch: torch.stack([pair(one) for one in batch]).mean()


def slow_dpo(one: Replies, loss_type: str, beta: float, smoothing: float = 0.0) -> Tensor:
    """One pair's loss, written from the papers."""
    won, lost = one.ratio("chosen"), one.ratio("rejected")
    mean_won, mean_lost = won / len(one.log_probs["chosen"]), lost / len(one.log_probs["rejected"])
    p = torch.sigmoid(beta * (won - lost))
    losses = {
        "sigmoid": lambda: -(1 - smoothing) * p.log() - smoothing * (1 - p).log(),
        "hinge": lambda: torch.clamp(1 - beta * (won - lost), min=0),
        "ipo": lambda: (mean_won - mean_lost - 1 / (2 * beta)) ** 2,
        "robust": lambda: (-(1 - smoothing) * p.log() + smoothing * (1 - p).log()) / (1 - 2 * smoothing),
        "exo_pair": lambda: p * (p / (1 - smoothing)).log() + (1 - p) * ((1 - p) / smoothing).log(),
        "nca_pair": lambda: -logsigmoid(beta * won) - logsigmoid(-beta * won) / 2 - logsigmoid(-beta * lost) / 2,
        "bco_pair": lambda: -logsigmoid(beta * won) - logsigmoid(-beta * lost),
        "sppo_hard": lambda: (won - 1 / (2 * beta)) ** 2 + (lost + 1 / (2 * beta)) ** 2,
        "apo_zero": lambda: (1 - torch.sigmoid(beta * won)) + torch.sigmoid(beta * lost),
        "apo_down": lambda: torch.sigmoid(beta * won) + (1 - p),
        "sigmoid_norm": lambda: -torch.sigmoid(beta * (mean_won - mean_lost)).log(),
    }
    return losses[loss_type]()
