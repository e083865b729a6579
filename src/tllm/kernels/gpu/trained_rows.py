"""The small operations of a layer on a GPU while it is trained: each one pass over memory, and one in its gradient.

`TrainedRowOperations` are `kernels.rows.row_operations.RowOperations` with gradients; nothing is done in place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tllm.kernels.gpu.row_operations import BLOCK, joined, tanh
from tllm.kernels.rows.torch_steps import clamped_swiglu_in_steps
from tllm.kernels.rows.trained_rows import TRAINED, Rotated


class TrainedRowOperations:
    """For rows that lie on a GPU, of which gradients are wanted."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
        """By torch's own kernel, which has a gradient; float32 copies are made once more for that and not kept."""
        if adds_one:
            return TRAINED.rms_norm(x, weight, eps, adds_one)
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)

    def add_and_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, adds_one: bool) -> tuple[Tensor, Tensor]:
        """In two steps."""
        x = x + y
        return x, self.rms_norm(x, weight, eps, adds_one)

    def gated(self, gate_up_TF: Tensor, activation: str) -> Tensor:
        return _Gated.apply(gate_up_TF, activation == "silu")  # type: ignore[no-any-return]

    def clamped_swiglu(self, gate_up_TF: Tensor, limit: float, alpha: float) -> Tensor:
        return clamped_swiglu_in_steps(gate_up_TF, limit, alpha)

    def rotate_in_place(self, x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Not in place: what is multiplied on the way back must stay."""
        return Rotated.apply(_turned, x_TNH, cos, sin)  # type: ignore[no-any-return]

    def rotate_both(self, q_TNH: Tensor, k_TKH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """One after the other."""
        return self.rotate_in_place(q_TNH, cos, sin), self.rotate_in_place(k_TKH, cos, sin)


class _Gated(torch.autograd.Function):
    """act(gate) * up, and from its gradient that of gate and up, side by side as they are."""

    @staticmethod
    def forward(ctx: Any, gate_up_TF: Tensor, is_silu: bool) -> Tensor:
        gate_up_TF = gate_up_TF.contiguous()
        ctx.save_for_backward(gate_up_TF)
        ctx.is_silu = is_silu
        return joined(_gated, gate_up_TF, IS_SILU=is_silu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TF: Tensor) -> tuple[Tensor, None]:
        (gate_up_TF,) = ctx.saved_tensors
        of_gate_up_TF, width = torch.empty_like(gate_up_TF), gate_up_TF.shape[1] // 2
        _of_gated[(len(gate_up_TF), triton.cdiv(width, BLOCK))](
            gate_up_TF, gradient_TF.contiguous(), of_gate_up_TF, width, BLOCK=BLOCK, IS_SILU=ctx.is_silu
        )
        return of_gate_up_TF, None


def _turned(x_TNH: Tensor, cos: Tensor, sin: Tensor, is_back: bool) -> Tensor:
    rows, heads, width = x_TNH.shape
    x_TNH = x_TNH if x_TNH.stride(2) == 1 else x_TNH.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    y_TNH = torch.empty(x_TNH.shape, dtype=x_TNH.dtype, device=x_TNH.device)
    half = cos.shape[-1] // 2
    block = triton.next_power_of_2(max(half, width - 2 * half))
    at_once = max(1, min(triton.next_power_of_2(heads), 2 * BLOCK // block))
    _rotate[(rows, triton.cdiv(heads, at_once))](
        x_TNH,
        cos,
        sin,
        y_TNH,
        x_TNH.stride(0),
        x_TNH.stride(1),
        heads,
        HALF=half,
        WIDTH=width,
        BLOCK=block,
        HEADS_AT_ONCE=at_once,
        IS_BACK=is_back,
    )
    return y_TNH


@triton.jit
def _activated(gate, IS_SILU: tl.constexpr):
    """act(gate) and its slope there."""
    if IS_SILU:
        share = 1.0 / (1.0 + tl.exp(-gate))
        act = gate * share
        slope = share * (1.0 + gate * (1.0 - share))
    else:
        bent = tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
        act = 0.5 * gate * (1.0 + bent)
        inner = 0.7978845608028654 * (1.0 + 3 * 0.044715 * gate * gate)
        slope = 0.5 * (1.0 + bent) + 0.5 * gate * (1.0 - bent * bent) * inner
    return act, slope


@triton.jit
def _gated(gate_up, y, width, BLOCK: tl.constexpr, IS_SILU: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_here = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=is_here, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=is_here, other=0.0)
    act, _ = _activated(gate.to(tl.float32), IS_SILU)
    tl.store(y + row * width + at, (act * up.to(tl.float32)).to(gate.dtype), mask=is_here)


@triton.jit
def _of_gated(gate_up, of_y, of_gate_up, width, BLOCK: tl.constexpr, IS_SILU: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_here = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=is_here, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=is_here, other=0.0)
    gradient = tl.load(of_y + row * width + at, mask=is_here, other=0.0).to(tl.float32)
    act, slope = _activated(gate.to(tl.float32), IS_SILU)
    of_gate = gradient * up.to(tl.float32) * slope
    tl.store(of_gate_up + row * 2 * width + at, of_gate.to(gate.dtype), mask=is_here)
    tl.store(of_gate_up + row * 2 * width + width + at, (gradient * act).to(gate.dtype), mask=is_here)


@triton.jit
def _rotate(
    x,
    cos,
    sin,
    y,
    stride,
    head_stride,
    heads,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    IS_BACK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    turn, is_turned = token * 2 * HALF + at, at < HALF
    cos_a = tl.load(cos + turn, mask=is_turned, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + turn + HALF, mask=is_turned, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + turn, mask=is_turned, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + turn + HALF, mask=is_turned, other=0.0).to(tl.float32)
    if IS_BACK:
        sin_a, sin_b = sin_b, sin_a
    is_here = (head < heads) & is_turned
    source = x + token * stride + head * head_stride + at
    target = y + (token * heads + head) * WIDTH + at
    a = tl.load(source, mask=is_here, other=0.0)
    b = tl.load(source + HALF, mask=is_here, other=0.0)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    tl.store(target, (wide_a * cos_a + wide_b * sin_a).to(a.dtype), mask=is_here)
    tl.store(target + HALF, (wide_b * cos_b + wide_a * sin_b).to(a.dtype), mask=is_here)
    if WIDTH > 2 * HALF:
        is_left = (head < heads) & (at < WIDTH - 2 * HALF)
        rest = tl.load(source + 2 * HALF, mask=is_left, other=0.0)
        tl.store(target + 2 * HALF, rest, mask=is_left)
