"""The dtype in which a training process multiplies by its weights: chosen before it begins, and said for its report."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tllm.kernels.training.training_matmul import PASSES, TRAINED_IN_16_BITS, choose_products
from tllm.training.attention.attention_dtype import choose_attention_dtype
from tllm.training.attention.kernel_attention import choose_kernel

BY_KERNEL = "attention by our kernel, which is faster here"
PRODUCTS = "products by our kernel, which is faster here"


def choose_matmul_dtype(weights: Iterable[Tensor], dtype: torch.dtype, fixed: bool = False) -> str:
    """Choose by measuring for a model of these weights, and say what; "" where it is what torch does of itself, for a
    dtype that is computed in no other.

    `fixed` measures nothing and leaves all to torch: what a run computes then does not depend on what was measured.
    """
    narrow = str(dtype).removeprefix("torch.")
    found = choose_products(weights, fixed)
    chosen = [passes for kind, passes in found.items() if kind.dtype == dtype]
    parts = []
    for name in PASSES:
        wide = sum(name in widened for widened in chosen)
        if wide:
            parts.append(name if wide == len(chosen) else f"{name} of {wide} in {len(chosen)} kinds")
    if dtype not in TRAINED_IN_16_BITS:
        ways = [f"{PRODUCTS}: {', '.join(parts)}"] if parts else []
        ways += [BY_KERNEL] if choose_kernel(dtype, fixed) else []
        return "; ".join([narrow, *ways]) if ways else ""
    is_wide, by_kernel = choose_attention_dtype(dtype, fixed) != dtype, choose_kernel(dtype, fixed)
    if is_wide and not by_kernel:
        parts.append("attention")
    said = f"; in float32, which is faster here: {', '.join(parts)}" if parts else ", as torch computes them"
    return f"{narrow}{said}; {BY_KERNEL}" if by_kernel else f"{narrow}{said}"
