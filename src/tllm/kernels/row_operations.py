"""The small operations of a layer in one pass over memory each, where torch would take several.

`takes(x)` says whether they can be used: without gradients, on the CPU, in float32, bfloat16 or float16. Each is equal
to torch's steps within rounding, and has the same bits on every processor.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tllm.kernels.library import FLOAT8, NUMBERS, CacheRowsArguments, Library, library

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
"""Those that `gated` has, by the numbers that csrc/row_operations.c gives them."""


def takes(x: Tensor) -> Library | None:
    """The kernels, if they can be used for x."""
    if torch.is_grad_enabled() or not x.is_cpu or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    return library()


def rms_norm(kernels: Library, x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
    """w x / sqrt(mean(x^2) + eps) over the last dim; (1 + w) in w's place if it `adds_one`."""
    x = x.contiguous()
    y, width = torch.empty_like(x), x.shape[-1]
    kernels.rms_norm(
        x.data_ptr(),
        NUMBERS[x.dtype],
        x.numel() // width,
        width,
        weight.data_ptr(),
        NUMBERS[weight.dtype],
        eps,
        adds_one,
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


def gated(kernels: Library, gate_up_TF: Tensor, activation: str) -> Tensor:
    """act(gate) * up, for gate and up side by side in rows [T, 2 F]."""
    gate_up_TF = gate_up_TF.contiguous()
    rows, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    y_TF = torch.empty(rows, width, dtype=gate_up_TF.dtype)
    kernels.gated(
        gate_up_TF.data_ptr(),
        NUMBERS[gate_up_TF.dtype],
        rows,
        width,
        ACTIVATIONS[activation],
        y_TF.data_ptr(),
        torch.get_num_threads(),
    )
    return y_TF


def clamped_swiglu(kernels: Library, gate_up_TF: Tensor, limit: float, alpha: float) -> Tensor:
    """gate sigmoid(alpha gate) (up + 1), for gates and ups that take turns in rows [T, 2 F].

    The gate is at most `limit`, and up within it.
    """
    gate_up_TF = gate_up_TF.contiguous()
    rows, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    y_TF = torch.empty(rows, width, dtype=gate_up_TF.dtype)
    kernels.experts.clamped_swiglu(
        gate_up_TF.data_ptr(),
        NUMBERS[gate_up_TF.dtype],
        rows,
        width,
        limit,
        alpha,
        y_TF.data_ptr(),
        torch.get_num_threads(),
    )
    return y_TF


def rotate_in_place(kernels: Library, x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head's halves (x1, x2) into (x1 cos - x2 sin, x2 cos + x1 sin), in x's own memory.

    cos and sin [T, 1, dim] in x's dtype, the first half of sin negative. Where the heads of a token do not follow one
    another, it happens in a copy.
    """
    rows, heads, width = x_TNH.shape
    if x_TNH.stride()[1:] != (width, 1):
        x_TNH = x_TNH.contiguous()
    kernels.rotate(
        x_TNH.data_ptr(),
        NUMBERS[x_TNH.dtype],
        rows,
        x_TNH.stride(0),
        heads,
        width,
        cos.shape[-1],
        cos.data_ptr(),
        sin.data_ptr(),
    )
    return x_TNH


def write_codes(kernels: Library, x_TKH: Tensor, places_T: Tensor, codes_KSH: Tensor, scales_KS1: Tensor) -> None:
    """Round each head's row of x to codes and a scale, and write them to the slots `places_T`: int8, or e4m3 where
    codes are uint8. engine/compute/cache_codes.py says how."""
    heads, slots, width = codes_KSH.shape
    if x_TKH.stride()[1:] != (width, 1):
        x_TKH = x_TKH.contiguous()
    rows = CacheRowsArguments(
        x=x_TKH.data_ptr(),
        places=places_T.data_ptr(),
        codes=codes_KSH.data_ptr(),
        scales=scales_KS1.data_ptr(),
        rows=len(places_T),
        stride=x_TKH.stride(0),
        heads=heads,
        width=width,
        slots=slots,
        dtype=NUMBERS[x_TKH.dtype],
        coding=FLOAT8 if codes_KSH.dtype == torch.uint8 else NUMBERS[codes_KSH.dtype],
    )
    kernels.cache.write_codes(ctypes.byref(rows), torch.get_num_threads())
