"""The small operations of a layer by the processor's kernels, csrc/row_operations.c."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tllm.kernels.library import DTYPE_NUMBERS, FLOAT8, CacheRowsArguments, Library, kernel_threads

ACTIVATION_NUMBERS = {"silu": 0, "gelu_pytorch_tanh": 1}
"""The numbers that csrc/gates.h gives them."""


class ProcessorRowOperations:
    """`RowOperations` by csrc/row_operations.c."""

    def __init__(self, kernels: Library) -> None:
        self._kernels = kernels

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
        x = x.contiguous()
        y, width = torch.empty_like(x), x.shape[-1]
        self._kernels.rows.rms_norm(
            x.data_ptr(),
            DTYPE_NUMBERS[x.dtype],
            x.numel() // width,
            width,
            weight.data_ptr(),
            DTYPE_NUMBERS[weight.dtype],
            eps,
            adds_one,
            y.data_ptr(),
            kernel_threads(),
        )
        return y

    def add_and_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, adds_one: bool) -> tuple[Tensor, Tensor]:
        x = x + y
        return x, self.rms_norm(x, weight, eps, adds_one)

    def gated(self, gate_up_TF: Tensor, activation: str) -> Tensor:
        return _joined(self._kernels.rows.gated, gate_up_TF, ACTIVATION_NUMBERS[activation])

    def clamped_swiglu(self, gate_up_TF: Tensor, limit: float, alpha: float) -> Tensor:
        return _joined(self._kernels.experts.clamped_swiglu, gate_up_TF, limit, alpha)

    def rotate_in_place(self, x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_TNH = with_joined_heads(x_TNH)
        self._kernels.rows.rotate(*joined_heads(x_TNH), cos.shape[-1], cos.data_ptr(), sin.data_ptr())
        return x_TNH

    def rotate_both(self, q_TNH: Tensor, k_TKH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotate_in_place(q_TNH, cos, sin), self.rotate_in_place(k_TKH, cos, sin)


def with_joined_heads(x_TNH: Tensor) -> Tensor:
    """x, in other memory where the heads of a token do not follow one another."""
    return x_TNH if x_TNH.stride()[1:] == (x_TNH.shape[2], 1) else x_TNH.contiguous()


def joined_heads(x_TNH: Tensor) -> tuple[int, ...]:
    """Where they are, as kernels take it: address, dtype, rows, elements from one row to the next, heads, width."""
    rows, heads, width = x_TNH.shape
    return x_TNH.data_ptr(), DTYPE_NUMBERS[x_TNH.dtype], rows, x_TNH.stride(0), heads, width


def _joined(function: Callable[..., None], gate_up_TF: Tensor, *own: float) -> Tensor:
    """What a function of the kernels makes of gates and ups, [T, F]; `own` are its own arguments."""
    gate_up_TF = gate_up_TF.contiguous()
    rows, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    y_TF = torch.empty(rows, width, dtype=gate_up_TF.dtype)
    where = gate_up_TF.data_ptr(), DTYPE_NUMBERS[gate_up_TF.dtype], rows, width
    function(*where, *own, y_TF.data_ptr(), kernel_threads())
    return y_TF


def write_codes(
    kernels: Library, x_TKH: Tensor, places_T: Tensor, codes_KSH: Tensor, scales_KS1: Tensor | None
) -> None:
    """Round each head's row of x to codes and a scale, and write them to the slots `places_T`: int8, or e4m3 where
    codes are uint8. engine/compute/cache_codes.py says how. Slots of x's own dtype get the row as it is."""
    heads, slots, width = codes_KSH.shape
    x_TKH = with_joined_heads(x_TKH)
    rows = CacheRowsArguments(
        x=x_TKH.data_ptr(),
        places=places_T.data_ptr(),
        codes=codes_KSH.data_ptr(),
        scales=0 if scales_KS1 is None else scales_KS1.data_ptr(),
        rows=len(places_T),
        stride=x_TKH.stride(0),
        heads=heads,
        width=width,
        slots=slots,
        dtype=DTYPE_NUMBERS[x_TKH.dtype],
        coding=FLOAT8 if codes_KSH.dtype == torch.uint8 else DTYPE_NUMBERS[codes_KSH.dtype],
    )
    kernels.cache.write_codes(rows, kernel_threads())
