"""How layers with a state in place of keys and values are computed: `Advance`, and the runs of rows that it takes.

Such a layer has a function that takes some sequences from a state, over tokens, to the next state. Whoever calls the
model knows where in a batch a sequence begins, and what state it is in: `Attend.recur` calls the function for each run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

State = tuple[Tensor, ...]
"""What the past of B sequences comes to in one layer: tensors [B, ...], float32 at least."""

StateShape = tuple[tuple[int, ...], ...]
"""The shapes of one sequence's state, without B."""

Run = tuple[int, int]
"""(sequences, tokens of each): rows of a batch, one sequence after another."""


class Advance(Protocol):
    """(state, or None where the sequences begin; each tensor of rows as [B, T, ...]) -> ([B, T, ...], next state)."""

    def __call__(self, state: State | None, /, *rows: Tensor) -> tuple[Tensor, State]: ...


def of_run(x: Tensor, run: Run) -> Tensor:
    """The rows of a run, [B T, ...], as [B, T, ...]."""
    return x.reshape(*run, *x.shape[1:])


def recur_afresh(runs: Iterable[Run], advance: Advance, *rows: Tensor) -> Tensor:
    """Over whole sequences, none of which has a past: [tokens, ...], without the states that they end in."""
    runs = list(runs)
    parts = zip(*(torch.split(x, [count * length for count, length in runs]) for x in rows), strict=True)
    outs = [
        advance(None, *(of_run(x, run) for x in part))[0].flatten(0, 1) for run, part in zip(runs, parts, strict=True)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs)
