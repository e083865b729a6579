"""The small operations of a layer in one pass over memory each on a GPU, in Triton: torch's steps within rounding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_WIDTH = 1 << 16
"""Of a row that one program has in its registers."""

BLOCK = 1024
"""Numbers of a program of what is done number by number."""


class GpuRowOperations:
    """`kernels.row_operations.RowOperations` for rows that lie on a GPU."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
        heads, width = (x.shape[1] if x.dim() == 3 else 1), x.shape[-1]
        x = x if x.stride(-1) == 1 and x.dim() in (2, 3) and width <= MOST_WIDTH else x.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        block = triton.next_power_of_2(width)
        _rms_norm[(x.numel() // width,)](
            x,
            weight,
            y,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            eps,
            HEADS=heads,
            WIDTH=width,
            BLOCK=block,
            ADDS_ONE=adds_one,
            num_warps=max(1, min(16, block // 256)),
        )
        return y

    def gated(self, gate_up_TF: Tensor, activation: str) -> Tensor:
        gate_up_TF = gate_up_TF.contiguous()
        rows, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
        y_TF = torch.empty(rows, width, dtype=gate_up_TF.dtype, device=gate_up_TF.device)
        _gated[(rows, triton.cdiv(width, BLOCK))](gate_up_TF, y_TF, width, BLOCK=BLOCK, IS_SILU=activation == "silu")
        return y_TF

    def clamped_swiglu(self, gate_up_TF: Tensor, limit: float, alpha: float) -> Tensor:
        gate_up_TF = gate_up_TF.contiguous()
        rows, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
        y_TF = torch.empty(rows, width, dtype=gate_up_TF.dtype, device=gate_up_TF.device)
        _clamped_swiglu[(rows, triton.cdiv(width, BLOCK))](gate_up_TF, y_TF, width, limit, alpha, BLOCK=BLOCK)
        return y_TF

    def rotate_in_place(self, x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, width = x_TNH.shape
        if x_TNH.stride()[1:] != (width, 1):
            x_TNH = x_TNH.contiguous()
        half = cos.shape[-1] // 2
        _rotate[(rows, heads)](x_TNH, cos, sin, x_TNH.stride(0), width, HALF=half, BLOCK=triton.next_power_of_2(half))
        return x_TNH


def write_slots(x_TKH: Tensor, places_T: Tensor, cache_KSH: Tensor) -> None:
    """Write the rows of x to their slots in a layer's keys, or values."""
    _, heads, width = x_TKH.shape
    if x_TKH.stride()[1:] != (width, 1):
        x_TKH = x_TKH.contiguous()
    _write_slots[(len(places_T), heads)](
        x_TKH,
        places_T,
        cache_KSH,
        x_TKH.stride(0),
        cache_KSH.shape[1],
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
    )


@triton.jit
def _rms_norm(
    x,
    weight,
    y,
    stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS_ONE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_here = at < WIDTH
    numbers = tl.load(x + (row // HEADS) * stride + (row % HEADS) * head_stride + at, mask=is_here, other=0.0)
    wide = numbers.to(tl.float32)
    wide = wide / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    w = tl.load(weight + at, mask=is_here, other=0.0).to(tl.float32)
    if ADDS_ONE:
        wide = wide * (1.0 + w)
    else:
        wide = wide.to(numbers.dtype).to(tl.float32) * w  # rounded in between as by torch
    tl.store(y + row * WIDTH + at, wide.to(numbers.dtype), mask=is_here)


@triton.jit
def tanh(x):
    """Of float32, with no exponential that overflows."""
    small = tl.exp(-2.0 * tl.abs(x))
    found = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0.0, -found, found)


@triton.jit
def _gated(gate_up, y, width, BLOCK: tl.constexpr, IS_SILU: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_here = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=is_here, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=is_here, other=0.0)
    wide = gate.to(tl.float32)
    if IS_SILU:
        act = wide / (1.0 + tl.exp(-wide))
    else:
        act = 0.5 * wide * (1.0 + tanh(0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)))
    found = act.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(y + row * width + at, found.to(gate.dtype), mask=is_here)


@triton.jit
def _clamped_swiglu(gate_up, y, width, limit, alpha, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_here = at < width
    gate = tl.load(gate_up + (row * width + at) * 2, mask=is_here, other=0.0)
    up = tl.load(gate_up + (row * width + at) * 2 + 1, mask=is_here, other=0.0)
    g, u = gate.to(tl.float32), up.to(tl.float32)
    # Written so that what is not a number stays one.
    g = tl.where(g > limit, limit, g)
    u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    found = g / (1.0 + tl.exp(-alpha * g)) * (u + 1.0)
    tl.store(y + row * width + at, found.to(gate.dtype), mask=is_here)


@triton.jit
def _rotate(x, cos, sin, stride, width, HALF: tl.constexpr, BLOCK: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    is_here = at < HALF
    first = x + token * stride + head * width + at
    turn = token * 2 * HALF + at
    a = tl.load(first, mask=is_here, other=0.0)
    b = tl.load(first + HALF, mask=is_here, other=0.0)
    a_cos = tl.load(cos + turn, mask=is_here, other=0.0).to(tl.float32)
    a_sin = tl.load(sin + turn, mask=is_here, other=0.0).to(tl.float32)
    b_cos = tl.load(cos + turn + HALF, mask=is_here, other=0.0).to(tl.float32)
    b_sin = tl.load(sin + turn + HALF, mask=is_here, other=0.0).to(tl.float32)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    tl.store(first, (wide_a * a_cos + wide_b * a_sin).to(a.dtype), mask=is_here)
    tl.store(first + HALF, (wide_b * b_cos + wide_a * b_sin).to(a.dtype), mask=is_here)


@triton.jit
def _write_slots(x, places, cache, stride, slots, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_here = at < WIDTH
    place = tl.load(places + row).to(tl.int64)
    numbers = tl.load(x + row * stride + head * WIDTH + at, mask=is_here)
    tl.store(cache + (head * slots + place) * WIDTH + at, numbers, mask=is_here)
