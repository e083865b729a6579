"""An adapter learns what the whole model learns: text that the tiny model has never seen, to nearly the same loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training.post_training.short_letters import (
    ADAPTER,
    BATCH,
    STEPS,
    WHOLE,
    letters_job,
    write_letters,
)
from tests.support.training.runs import records, train

LAST = 20


def last_loss(folder: Path, rows: Path, **more: Any) -> tuple[float, float]:
    """The loss of the first step, and the mean of the last ones: all of rows that were not learned before."""
    found = records(train(letters_job(rows, folder, **more), "pp=1"))
    return found[0].loss, sum(record.loss for record in found[-LAST:]) / LAST


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_an_adapter_comes_within_two_percent_of_the_loss_of_the_whole_model(tmp_path: Path) -> None:
    """`python -m benchmarks.training.experiments.learning` shows the same by rows held out, for three seeds."""
    torch.set_num_threads(1)
    rows = write_letters(tmp_path / "letters.jsonl", STEPS * BATCH * 2)
    first, whole = last_loss(tmp_path / "whole", rows, **WHOLE)
    first_adapted, adapted = last_loss(tmp_path / "adapter", rows, **ADAPTER)
    print(f"first {first:.4f}, whole model {whole:.4f}, adapter {adapted:.4f}: {adapted / whole - 1:+.2%}")
    assert abs(first - first_adapted) < 1e-5 * first, "an adapter begins as nothing"
    assert whole < 0.5 * first, "there is something to learn"
    assert adapted < 1.02 * whole
