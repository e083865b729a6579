"""The small operations of a layer in one pass over memory each, where torch would take several.

`row_operations(x)` has them for where x lies: by kernels in float32, bfloat16 or float16, and by torch's steps where
there are none and gradients are wanted. Each is equal to torch's steps within rounding; on processors they have the
same bits on every one, whatever the threads.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tllm.kernels.gpu_kernels import gpu_kernels
from tllm.kernels.library import DTYPES, kernels_for
from tllm.kernels.rows.processor_rows import ProcessorRowOperations
from tllm.kernels.rows.trained_rows import TRAINED


class RowOperations(Protocol):
    """What is done to the rows of a tensor."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
        """w x / sqrt(mean(x^2) + eps) over the last dim; (1 + w) in w's place if it `adds_one`."""

    def add_and_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, adds_one: bool) -> tuple[Tensor, Tensor]:
        """x + y, and what `rms_norm` makes of that."""

    def gated(self, gate_up_TF: Tensor, activation: str) -> Tensor:
        """act(gate) * up, for gate and up side by side in rows [T, 2 F]."""

    def clamped_swiglu(self, gate_up_TF: Tensor, limit: float, alpha: float) -> Tensor:
        """gate sigmoid(alpha gate) (up + 1), for gates and ups that take turns in rows [T, 2 F].

        The gate is at most `limit`, and up within it.
        """

    def rotate_in_place(self, x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn each head's halves (x1, x2) into (x1 cos - x2 sin, x2 cos + x1 sin), in x's own memory.

        cos and sin [T, 1, dim] in x's dtype, the first half of sin negative. Where the heads of a token do not follow
        one another, or gradients are wanted, it happens in a copy.
        """

    def rotate_both(self, q_TNH: Tensor, k_TKH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """`rotate_in_place` of queries and keys of the same tokens."""


def row_operations(x: Tensor) -> RowOperations | None:
    """What there is for x and where it lies; None: torch's own steps."""
    gpu = None if x.is_cpu else gpu_kernels(x.device.type)
    if gpu is not None and x.dtype in DTYPES:
        fused: RowOperations = gpu.trained_rows if torch.is_grad_enabled() else gpu.row_operations
        return fused
    if torch.is_grad_enabled():
        return TRAINED
    kernels = kernels_for(x)
    return None if kernels is None else ProcessorRowOperations(kernels)
