"""The slow twin of a cache in one byte each: rows rounded one by one with numpy, and a model that attends to them."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.support.models.layouts import spec_of
from tests.support.models.packed_causal import PackedCausal
from tests.support.models.slow_load import slow_load
from tllm.model.attention import AttentionSpec
from tllm.model.transformer import build
from tllm.parallel.mesh import whole

E4M3 = np.array(
    [(code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10) for code in range(127)]
)
"""What the codes 0 to 126 stand for; with the highest bit they are negative, and 127 is no number."""


@functools.cache
def round_row(kind: str, row: bytes) -> tuple[list[int], float, list[float]]:
    """The codes of a float32 row, its scale, and in float64 what it is read as."""
    numbers = np.frombuffer(row, np.float32)
    scale = np.maximum(np.abs(numbers).max() / np.float32(127 if kind == "int8" else 448), np.float32(2.0**-126))
    codes = [int8_of(float(y)) if kind == "int8" else e4m3_of(float(y)) for y in numbers / scale]
    values = [code if kind == "int8" else (-1.0 if code > 127 else 1.0) * E4M3[code % 128] for code in codes]
    return codes, float(scale), [float(value) * float(scale) for value in values]


def int8_of(y: float) -> int:
    """The nearest integer; of two, the even one."""
    return round(y)


def e4m3_of(y: float) -> int:
    """The code of the nearest number; of two, the even one."""
    distances = np.abs(E4M3 - abs(y))
    nearest = np.flatnonzero(distances == distances.min())
    return int(nearest[nearest % 2 == 0][0] if len(nearest) > 1 else nearest[0]) + 128 * (math.copysign(1, y) < 0)


def rounded_rows(kind: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales [..., 1], and in float64 what is read, of rows [..., width]."""
    rows = [round_row(kind, row.float().numpy().tobytes()) for row in x.reshape(-1, x.shape[-1])]
    codes, scales, read = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    return codes.view(x.shape), scales.view(*x.shape[:-1], 1), read.view(x.shape)


class RoundedCausal(PackedCausal):
    """Plain attention of one whole sequence, without a cache, to keys and values as a cache would give them back."""

    def __init__(self, specs: dict[int, AttentionSpec], length: int, kind: str) -> None:
        super().__init__(specs, [length])
        self.kind = kind

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        k_TKH, v_TKH = (rounded_rows(self.kind, x)[2] for x in (k_TKH, v_TKH))
        return super().__call__(layer, q_TNH, k_TKH, v_TKH, sinks_N)


class RoundedModel:
    """A model of a folder in float64 that computes whole sequences, and attends to rounded keys and values."""

    def __init__(self, folder: Path, kind: str) -> None:
        spec = spec_of(folder)
        self.kind, self.model = kind, build(spec, whole(spec), torch.float64)
        slow_load(self.model, folder)

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        """Of each place, [T, V]."""
        attend = RoundedCausal(self.model.attention_specs(), len(ids), self.kind)
        lengths_T = torch.full((len(ids),), len(ids))
        return self.model.logits(self.model(torch.tensor(ids), torch.arange(len(ids)), attend, lengths_T))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """A reply; the whole sequence is computed again for each token."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]
