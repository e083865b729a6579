"""Rows of a batch as the tensors that the model takes: all tokens of a microbatch in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tllm.train.encode import IGNORED
from tllm.train.packed import PackedRow


@dataclass(frozen=True, eq=False)
class Tokens:
    """One microbatch. `lengths` are the documents' tokens, in order, those of filling included."""

    ids_T: Tensor
    labels_T: Tensor
    positions_T: Tensor
    lengths: list[int]

    @property
    def predicted(self) -> int:
        """How many tokens are learned: what a mean over the global batch is divided by, summed over the ranks."""
        return int((self.labels_T != IGNORED).sum())


def tokens_of(rows: Sequence[PackedRow], width: int | None = None, device: torch.device | str = "cpu") -> Tokens:
    """Rows end to end; with `width`, each filled to so many tokens by a last document of id 0 that is not learned."""
    ids, labels, positions = [], [], []
    lengths: list[int] = []
    for row in rows:
        over = 0 if width is None else width - len(row.input_ids)
        assert over >= 0, f"a row of {len(row.input_ids)} tokens is wider than {width}"
        ids += [row.input_ids, np.zeros(over, dtype=np.int64)]
        labels += [row.labels, np.full(over, IGNORED, dtype=np.int64)]
        positions += [row.positions, np.arange(over, dtype=np.int64)]
        lengths += [*row.lengths, *([over] if over else [])]
    return Tokens(_joined(ids, device), _joined(labels, device), _joined(positions, device), lengths)


def _joined(parts: list[NDArray[np.int64]], device: torch.device | str) -> Tensor:
    whole = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return torch.from_numpy(whole).to(device)
