"""A taught student is better than one that read the same texts alone.

What is measured is measured by `transformers`, on texts that none of them learned. Figures are in docs/log/training.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.training.post_training.letter_languages import (
    FEW,
    STUDENT,
    TEACHER,
    ids_of,
    language_job,
    of_one_letter,
    opened,
    text_loss,
    write_shape,
    write_texts,
)
from tests.support.training.runs import train
from tllm.training.job.distillation_keys import DistillationKeys


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_student_learns_more_of_few_texts_from_a_teacher_of_twice_its_size(seed: int, tmp_path: Path) -> None:
    """A teacher of 8,000 texts; a student of 60 of them alone, and from the same weights one that it teaches."""
    language = of_one_letter(seed)
    many, few, held_out = (
        write_texts(tmp_path / f"{count}.jsonl", language, count, seed + count) for count in (8_000, FEW, 401)
    )
    large, small = (write_shape(tmp_path / f"width-{width}", width) for width in (TEACHER, STUDENT))
    train(language_job(large, tmp_path / "teacher", many, 120, seed=seed), "pp=1")
    keys = DistillationKeys(str(tmp_path / "teacher" / "final"), top_k=0)
    train(language_job(small, tmp_path / "alone", few, 80, seed=seed), "pp=1")
    train(language_job(small, tmp_path / "taught", few, 80, seed=seed, task="distill", distill=keys), "pp=1")
    ids_BT = ids_of(small, held_out)
    teacher, alone, taught = (
        text_loss(opened(tmp_path / name / "final"), ids_BT) for name in ("teacher", "alone", "taught")
    )
    print({"seed": seed, "teacher": teacher, "text alone": alone, "taught": taught})
    assert teacher < taught < alone - 0.2
