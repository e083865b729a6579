"""The small operations of a layer in one pass over memory each on a GPU, in Triton: torch's steps within rounding."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Numbers of a program of what is done number by number."""


class GpuRowOperations:
    """`kernels.rows.row_operations.RowOperations` for rows that lie on a GPU."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
        return self._norm(x, None, weight, eps, adds_one)[1]

    def add_and_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, adds_one: bool) -> tuple[Tensor, Tensor]:
        return self._norm(x, y.contiguous(), weight, eps, adds_one)

    def _norm(
        self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float, adds_one: bool
    ) -> tuple[Tensor, Tensor]:
        """x, or the sum with what is `added`, and its norm."""
        width = x.shape[-1]
        rows = x if x.stride(-1) == 1 and x.dim() in (2, 3) else x.contiguous().view(-1, width)
        heads = rows.shape[1] if rows.dim() == 3 else 1
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        whole = x if added is None else torch.empty_like(y)
        block = triton.next_power_of_2(width)
        _rms_norm[(x.numel() // width,)](
            rows,
            rows if added is None else added,
            weight,
            whole,
            y,
            rows.stride(0),
            rows.stride(1) if rows.dim() == 3 else 0,
            eps,
            HEADS=heads,
            WIDTH=width,
            BLOCK=block,
            ADDS_ONE=adds_one,
            ADDS=added is not None,
            num_warps=max(1, min(16, block // 256)),
        )
        return whole, y

    def gated(self, gate_up_TF: Tensor, activation: str) -> Tensor:
        return joined(_gated, gate_up_TF, IS_SILU=activation == "silu")

    def clamped_swiglu(self, gate_up_TF: Tensor, limit: float, alpha: float) -> Tensor:
        return joined(_clamped_swiglu, gate_up_TF, limit, alpha)

    def rotate_in_place(self, x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, width = x_TNH.shape
        if x_TNH.stride()[1:] != (width, 1):
            x_TNH = x_TNH.contiguous()
        half = cos.shape[-1] // 2
        block, stride = triton.next_power_of_2(half), x_TNH.stride(0)
        _rotate[(rows, heads)](x_TNH, x_TNH, cos, sin, stride, stride, heads, width, HALF=half, BLOCK=block)
        return x_TNH

    def rotate_both(self, q_TNH: Tensor, k_TKH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rows, heads, width = q_TNH.shape
        if not all(x.stride()[1:] == (width, 1) for x in (q_TNH, k_TKH)):
            return self.rotate_in_place(q_TNH, cos, sin), self.rotate_in_place(k_TKH, cos, sin)
        half, strides = cos.shape[-1] // 2, (q_TNH.stride(0), k_TKH.stride(0))
        grid, block = (rows, heads + k_TKH.shape[1]), triton.next_power_of_2(half)
        _rotate[grid](q_TNH, k_TKH, cos, sin, *strides, heads, width, HALF=half, BLOCK=block)
        return q_TNH, k_TKH


def joined(kernel: Any, gate_up_TF: Tensor, *own: float, **constants: bool) -> Tensor:
    """What a kernel makes of gates and ups, [T, F], number by number; `own` and `constants` are its own arguments."""
    gate_up_TF = gate_up_TF.contiguous()
    rows, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    y_TF = torch.empty(rows, width, dtype=gate_up_TF.dtype, device=gate_up_TF.device)
    kernel[(rows, triton.cdiv(width, BLOCK))](gate_up_TF, y_TF, width, *own, BLOCK=BLOCK, **constants)
    return y_TF


def write_slots(k_TKH: Tensor, v_TKH: Tensor, places_T: Tensor, keys_KSH: Tensor, values_KSH: Tensor) -> None:
    """Write the rows of k and v, of one width, to their slots in a layer's keys and values."""
    _, heads, width = k_TKH.shape
    k_TKH, v_TKH = (x if x.stride()[1:] == (width, 1) else x.contiguous() for x in (k_TKH, v_TKH))
    _write_slots[(len(places_T), heads)](
        k_TKH,
        v_TKH,
        places_T,
        keys_KSH,
        values_KSH,
        k_TKH.stride(0),
        v_TKH.stride(0),
        keys_KSH.shape[1],
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
    )


@triton.jit
def _rms_norm(
    x,
    added,
    weight,
    whole,
    y,
    stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    ADDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_here = at < WIDTH
    numbers = tl.load(x + (row // HEADS) * stride + (row % HEADS) * head_stride + at, mask=is_here, other=0.0)
    wide = numbers.to(tl.float32)
    if ADDS:
        wide += tl.load(added + row * WIDTH + at, mask=is_here, other=0.0).to(tl.float32)
        tl.store(whole + row * WIDTH + at, wide.to(numbers.dtype), mask=is_here)
        wide = wide.to(numbers.dtype).to(tl.float32)  # what is normed is the sum as it is kept
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
def _rotate(q, k, cos, sin, q_stride, k_stride, q_heads, width, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """One head of one token: those of q, then those of k."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    is_here = at < HALF
    first = q + token * q_stride + head * width + at
    if head >= q_heads:
        first = k + token * k_stride + (head - q_heads) * width + at
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
def _write_slots(k, v, places, keys, values, k_stride, v_stride, slots, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_here = at < WIDTH
    place = tl.load(places + row).to(tl.int64)
    slot = (head * slots + place) * WIDTH + at
    tl.store(keys + slot, tl.load(k + row * k_stride + head * WIDTH + at, mask=is_here), mask=is_here)
    tl.store(values + slot, tl.load(v + row * v_stride + head * WIDTH + at, mask=is_here), mask=is_here)
