"""The dtype in which a training process multiplies by its weights: chosen before it begins, and said for its report."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tllm.kernels.training_matmul import PASSES, TRAINED_IN_16_BITS, choose_products
from tllm.training.attention.attention_dtype import choose_attention_dtype


def choose_matmul_dtype(weights: Iterable[Tensor], dtype: torch.dtype, fixed: bool = False) -> str:
    """Choose by measuring for a model of these weights, and say what; "" for a dtype of which there is no choice.

    `fixed` measures nothing and leaves all to torch: what a run computes then does not depend on what was measured.
    """
    if dtype not in TRAINED_IN_16_BITS:
        return ""
    chosen = choose_products(weights, fixed).values()
    parts = []
    for name in PASSES:
        wide = sum(name in widened for widened in chosen)
        if wide:
            parts.append(name if wide == len(chosen) else f"{name} of {wide} in {len(chosen)} kinds")
    if choose_attention_dtype(dtype, fixed) != dtype:
        parts.append("attention")
    narrow = str(dtype).removeprefix("torch.")
    if not parts:
        return f"{narrow}, as torch computes them"
    return f"{narrow}; in float32, which is faster here: {', '.join(parts)}"
