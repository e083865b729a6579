"""A student that learns from a teacher twice its size is better on held-out text than the same student on text alone.

The teacher is the tiny model that ships with the project. It was trained on the standard library without the folder
`idlelib`; both students see one part of that folder, and neither model has seen the other part.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.training.runs import records, train
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.text.tokenizer import Tokenizer
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.data.batch_tensors import Tokens
from tllm.training.job.distillation_keys import DistillationKeys
from tllm.training.job.job import Job
from tllm.training.state.initial_weights import parameter_count
from tllm.training.teachers.teacher_model import TeacherModel

TEACHER = Path("models/tiny").resolve()
STUDENT = dict(hidden_size=112, intermediate_size=264, num_attention_heads=4, num_key_value_heads=2, head_dim=28)
STD = 0.05
"""Of the first weights: half the inverse root of the width, with which small models learn from the start (the log)."""

SEEDS = (1, 2)
STEPS, WIDTH, WINDOWS = 100, 128, 8
TOP_K = 32


def write_texts(folder: Path) -> tuple[Path, list[str]]:
    """The rows to learn, and the held-out texts: every fourth file."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"], "idlelib").glob("*.py"))
    if len(files) < 20:
        pytest.skip("this Python is installed without idlelib")
    texts = [file.read_text("utf-8") for file in files]
    kept = [text for number, text in enumerate(texts) if number % 4]
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in kept))
    return path, texts[::4]


def student_job(folder: Path, texts: Path, name: str, seed: int, **more: Any) -> Job:
    config = {**read_config(TEACHER), **STUDENT, "torch_dtype": "float32", "initializer_range": STD}
    (folder / "config.json").write_text(json.dumps(config))
    assert parameter_count(spec_from_config(read_config(TEACHER))) / parameter_count(spec_from_config(config)) > 1.9
    return Job(
        config_name=str(folder / "config.json"),
        tokenizer_name=str(TEACHER),
        train_files=(str(texts),),
        output_dir=str(folder / f"{name}-{seed}"),
        max_steps=STEPS,
        seq_len=WIDTH,
        global_batch_size=8,
        microbatch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        weight_decay=0.1,
        seed=seed,
        save_steps=STEPS,
        **more,
    )


def held_out_loss(folder: Path, texts: list[str]) -> float:
    """Nats a token, over the first windows of each text, as long as a row."""
    tokenizer, model = Tokenizer.from_folder(TEACHER), TeacherModel.open(str(folder)).model
    assert tokenizer is not None
    total, count = 0.0, 0
    for text in texts:
        for window_T in torch.tensor(tokenizer.encode(text)).split(WIDTH)[:WINDOWS]:
            places_T, lengths = torch.arange(len(window_T)), [len(window_T)]
            tokens = Tokens(window_T, window_T, places_T, lengths)
            with torch.no_grad():
                x_TD = model(window_T, places_T, TrainAttend(model.attention_specs(), tokens), tokens.lengths_T)
                total += float(F.cross_entropy(model.logits(x_TD)[:-1], window_T[1:], reduction="sum"))
            count += len(window_T) - 1
    return total / count


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_a_taught_student_is_better_on_text_that_nobody_has_seen(tmp_path: Path) -> None:
    texts, held_out = write_texts(tmp_path)
    teacher = held_out_loss(TEACHER, held_out)
    for seed in SEEDS:
        alone = student_job(tmp_path, texts, "alone", seed)
        keys = DistillationKeys(str(TEACHER), top_k=TOP_K)
        taught = student_job(tmp_path, texts, "taught", seed, task="distill", distill=keys)
        train(alone, "pp=1")
        told = records(train(taught, "pp=1"))[-1].metrics
        losses = [held_out_loss(Path(job.output_dir) / "final", held_out) for job in (alone, taught)]
        print(f"\nseed {seed}: text alone {losses[0]:.4f}, taught {losses[1]:.4f}, teacher {teacher:.4f}; last {told}")
        assert losses[1] < losses[0] - 0.02
