"""The positions of a batch's tokens in their sequences, as the model's rope takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tllm.devices.choose import CPU
from tllm.engine.schedule.batch import Batch, BatchEntry


def num_singles(entries: Sequence[BatchEntry]) -> int:
    """How many entries have a single token, as replies have; these come first in a batch."""
    return next((place for place, entry in enumerate(entries) if entry.count > 1), len(entries))


def positions(batch: Batch, device: torch.device = CPU) -> Tensor:
    """Each token's place in its sequence, [T]."""
    return torch.tensor([p for entry in batch.entries for p in range(entry.start, entry.stop)]).to(device)


def lengths(batch: Batch, device: torch.device = CPU) -> Tensor:
    """How long each token's sequence was when it was first computed, [T]: what rope that scales by length goes by.

    That is the prompt's length for a prompt token and its own place + 1 for a later one, however batches are cut.
    """
    found = [max(p + 1, e.prompt_length) for e in batch.entries for p in range(e.start, e.stop)]
    return torch.tensor(found).to(device)
