"""What ranks must have alike before they go on together."""

from __future__ import annotations

import torch

from tllm.comm.group import Group


def most(group: Group, number: float) -> float:
    """The greatest of the ranks' numbers, the same on each."""
    found = torch.tensor([number], dtype=torch.float64)
    return float(group.all_reduce(found, "max"))
