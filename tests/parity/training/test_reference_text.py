"""A text learned under a plan, and by a loop that anybody would write over `transformers`: the same validation loss.

The text is the Python language reference; the variable TLLM_TEXT names another file, tinyshakespeare.txt say. The last
tenth of it is not trained on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.support.training.runs import train
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.encoder import IGNORED
from tllm.training.data.packing import PackedRow
from tllm.training.job.initial_model import END, open_initial_model, train_tokenizer
from tllm.training.job.job import Job

VOCABULARY, SEQ_LEN, STEPS = 512, 128, 18
VALIDATION = 20_000
"""Tokens of the last tenth that are looked at, at most."""

Documents = list[tuple[Tensor, Tensor]]
"""(ids, labels) of each; a label is the next id, or IGNORED."""


def text() -> str:
    file = os.environ.get("TLLM_TEXT")
    return Path(file).read_text("utf-8") if file else "\n\n".join(page for _, page in sorted(topics.topics.items()))


def save_start(folder: Path, learned: str) -> transformers.PreTrainedModel:
    """A small model with random weights and a tokenizer trained on the text, as a folder."""
    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=SEQ_LEN, eos_token_id=0, **shape
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    train_tokenizer(iter(learned.split("\n\n")), VOCABULARY).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return model


def job_over(folder: Path, learned: str) -> Job:
    (folder / "learned.txt").write_text(learned, "utf-8")
    return Job(
        output_dir=str(folder / "run"),
        train_files=(str(folder / "learned.txt"),),
        model_name_or_path=str(folder / "model"),
        max_steps=STEPS,
        seq_len=SEQ_LEN,
        global_batch_size=16,
        microbatch_size=4,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        weight_decay=0.1,
        save_steps=STEPS,
    )


def documents_of(rows: list[PackedRow]) -> Documents:
    """The pieces of packed rows, apart."""
    found: Documents = []
    for row in rows:
        cuts = np.cumsum(row.lengths)[:-1]
        pairs = zip(np.split(row.input_ids, cuts), np.split(row.labels, cuts), strict=True)
        found += [(torch.from_numpy(ids), torch.from_numpy(labels)) for ids, labels in pairs]
    return found


def loss_sum(model: transformers.PreTrainedModel, documents: Documents) -> tuple[Tensor, int]:
    """Over all predicted tokens, and their number. Padding stands after a document, where a causal model sees none."""
    padded = torch.nn.utils.rnn.pad_sequence
    ids_BT = padded([ids for ids, _ in documents], batch_first=True)
    labels_BT = padded([labels for _, labels in documents], batch_first=True, padding_value=IGNORED)
    logits = model(ids_BT).logits.flatten(0, 1)
    loss = F.cross_entropy(logits, labels_BT.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, int((labels_BT != IGNORED).sum())


def plain_loop(job: Job, model: transformers.PreTrainedModel) -> None:
    """Train the model in place on the rows of the job."""
    batches = open_initial_model(job).batches(job)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [dict(params=matrices, weight_decay=job.weight_decay), dict(params=norms, weight_decay=0.0)],
        lr=job.learning_rate,
    )
    rates = transformers.get_cosine_schedule_with_warmup(optimizer, job.warmup_steps, job.max_steps)
    for step in range(job.max_steps):
        loss, predicted = loss_sum(model, documents_of(batches.step(step)))
        (loss / predicted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
    batches.close()


def held_out(folder: Path, unseen: str) -> Iterator[Documents]:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    ids_T = torch.tensor(tokenizer.encode(unseen)[:VALIDATION])
    for part in ids_T.split(32 * SEQ_LEN):
        yield [(ids[:-1], ids[1:]) for ids in part.split(SEQ_LEN) if len(ids) > 1]


@torch.no_grad()
def validation_loss(model: transformers.PreTrainedModel, folder: Path, unseen: str) -> float:
    sums = [loss_sum(model, documents) for documents in held_out(folder, unseen)]
    return sum(float(loss) for loss, _ in sums) / sum(count for _, count in sums)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_text_is_learned_as_by_a_plain_loop(tmp_path: Path) -> None:
    whole = text()
    learned, unseen = whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]
    truth = save_start(tmp_path / "model", learned)
    job = job_over(tmp_path, learned)
    before = validation_loss(truth, tmp_path / "model", unseen)
    plain_loop(job, truth)
    train(job, "dp=2,pp=2")
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final", dtype=torch.float32)
    want, got = (validation_loss(model, tmp_path / "model", unseen) for model in (truth, ours))
    print(f"validation loss: {before:.4f} before, {want:.5f} by the plain loop, {got:.5f} under dp=2,pp=2")
    assert want < before - 0.5
    assert abs(got - want) < 1e-3
