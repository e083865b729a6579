"""The small operations of a layer with gradients, on any device.

They keep what they take in, and what a backward pass can work out of it is not kept. By the processor's kernels,
csrc/trained_rows.c, the bits are the same on every processor, whatever the threads; where there are none, torch's steps
are taken, and once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tllm.kernels.library import DTYPE_NUMBERS, LANES, kernel_threads, kernels_for
from tllm.kernels.rows.processor_rows import (
    ACTIVATION_NUMBERS,
    ProcessorRowOperations,
    joined_heads,
    with_joined_heads,
)
from tllm.kernels.rows.torch_steps import (
    clamped_swiglu_in_steps,
    gated_in_steps,
    gradients_in_steps,
    rms_norm_in_steps,
    rotated_in_steps,
)

SUMMED_ROWS = 64
"""Rows of a part of the gradient of a norm's weight, as in csrc/trained_rows.c."""


class LeanRowOperations:
    """`RowOperations` with gradients, on any device: by the processor's kernels, else by torch's steps, which the
    backward pass then takes once more."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
        return _Normed.apply(x, weight, eps, adds_one)  # type: ignore[no-any-return, no-untyped-call]

    def add_and_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, adds_one: bool) -> tuple[Tensor, Tensor]:
        x = x + y
        return x, self.rms_norm(x, weight, eps, adds_one)

    def gated(self, gate_up_TF: Tensor, activation: str) -> Tensor:
        return _Gated.apply(gate_up_TF, activation)  # type: ignore[no-any-return, no-untyped-call]

    def clamped_swiglu(self, gate_up_TF: Tensor, limit: float, alpha: float) -> Tensor:
        return clamped_swiglu_in_steps(gate_up_TF, limit, alpha)

    def rotate_in_place(self, x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Not in place."""
        return Rotated.apply(_turned, x_TNH, cos, sin)  # type: ignore[no-any-return, no-untyped-call]

    def rotate_both(self, q_TNH: Tensor, k_TKH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotate_in_place(q_TNH, cos, sin), self.rotate_in_place(k_TKH, cos, sin)


TRAINED = LeanRowOperations()


class _Gated(torch.autograd.Function):
    """act(gate) * up. It keeps gate and up alone."""

    @staticmethod
    def forward(ctx: Any, gate_up_TF: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up_TF)
        ctx.activation, kernels = activation, kernels_for(gate_up_TF)
        if kernels is None:
            return gated_in_steps(gate_up_TF, activation)
        return ProcessorRowOperations(kernels).gated(gate_up_TF, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TF: Tensor) -> tuple[Tensor, None]:
        (gate_up_TF,), kernels = ctx.saved_tensors, kernels_for(gradient_TF)
        if kernels is None:
            steps = partial(gated_in_steps, activation=ctx.activation)
            return gradients_in_steps(steps, gradient_TF, gate_up_TF)[0], None
        gate_up_TF, gradient_TF = gate_up_TF.contiguous(), gradient_TF.contiguous()
        of_gate_up_TF = torch.empty_like(gate_up_TF)
        kernels.rows.gated_backward(
            gate_up_TF.data_ptr(),
            DTYPE_NUMBERS[gate_up_TF.dtype],
            *gradient_TF.shape,
            ACTIVATION_NUMBERS[ctx.activation],
            gradient_TF.data_ptr(),
            of_gate_up_TF.data_ptr(),
            kernel_threads(),
        )
        return of_gate_up_TF, None


class _Normed(torch.autograd.Function):
    """w x s for the scale s = 1 / sqrt(mean(x^2) + eps) of each row. It keeps w, x and s: x as it is given, which may
    lie in a product that others keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
        kernels, width, ctx.how = kernels_for(x), x.shape[-1], (eps, adds_one)
        kept = weight.clone()  # with ZeRO-3 the weight has no memory any more when its own gradient is worked out late
        if kernels is None:
            ctx.save_for_backward(x, kept)
            return rms_norm_in_steps(x, weight, eps, adds_one)
        scales = torch.empty(x.numel() // width)
        ctx.save_for_backward(x, kept, scales)
        x = x.contiguous()
        y = torch.empty_like(x)
        kernels.rows.rms_norm_kept(
            x.data_ptr(),
            DTYPE_NUMBERS[x.dtype],
            len(scales),
            width,
            weight.data_ptr(),
            DTYPE_NUMBERS[weight.dtype],
            eps,
            adds_one,
            y.data_ptr(),
            scales.data_ptr(),
            kernel_threads(),
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *scales = ctx.saved_tensors
        eps, adds_one = ctx.how
        if not scales:
            steps = partial(rms_norm_in_steps, eps=eps, adds_one=adds_one)
            return *gradients_in_steps(steps, gradient, x, weight), None, None
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return _of_norm(gradient, x, weight, scales[0], adds_one, of_weight), of_weight, None, None


def _of_norm(
    gradient: Tensor, x: Tensor, weight: Tensor, scales: Tensor, adds_one: bool, of_weight: Tensor | None
) -> Tensor:
    """The gradient of x; that of the weight is written to `of_weight`, if it is wanted."""
    kernels = kernels_for(x)
    assert kernels is not None, "they made the scales"
    x, gradient, (rows, width) = x.contiguous(), gradient.contiguous(), (len(scales), x.shape[-1])
    of_x = torch.empty_like(x)
    parts = None if of_weight is None else torch.empty(-(-rows // SUMMED_ROWS), -(-width // LANES) * LANES)
    kernels.rows.rms_norm_backward(
        x.data_ptr(),
        DTYPE_NUMBERS[x.dtype],
        rows,
        width,
        weight.data_ptr(),
        DTYPE_NUMBERS[weight.dtype],
        adds_one,
        scales.data_ptr(),
        gradient.data_ptr(),
        of_x.data_ptr(),
        None if of_weight is None else of_weight.data_ptr(),
        None if parts is None else parts.data_ptr(),
        kernel_threads(),
    )
    return of_x


class Rotated(torch.autograd.Function):
    """(x1 cos1 + x2 sin1, x2 cos2 + x1 sin2) of each head's halves; widths past them stay.

    Its gradient is turned back, which is the same with the halves of the sines exchanged: `turned(x, cos, sin,
    is_back)` does both.
    """

    @staticmethod
    def forward(ctx: Any, turned: Callable[..., Tensor], x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.turned = turned
        ctx.save_for_backward(cos, sin)
        return turned(x_TNH, cos, sin, is_back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TNH: Tensor) -> tuple[None, Tensor, None, None]:
        return None, ctx.turned(gradient_TNH, *ctx.saved_tensors, is_back=True), None, None


def _turned(x_TNH: Tensor, cos: Tensor, sin: Tensor, is_back: bool) -> Tensor:
    kernels = kernels_for(x_TNH)
    if kernels is None:
        return rotated_in_steps(x_TNH, cos, sin.roll(sin.shape[-1] // 2, -1) if is_back else sin)
    x_TNH, cos, sin = with_joined_heads(x_TNH), cos.contiguous(), sin.contiguous()
    y_TNH = torch.empty(x_TNH.shape, dtype=x_TNH.dtype)
    turn = cos.shape[-1], cos.data_ptr(), sin.data_ptr(), is_back
    kernels.rows.rotate_rows(*joined_heads(x_TNH), *turn, y_TNH.data_ptr(), kernel_threads())
    return y_TNH
