"""The small operations of a layer by torch: what kernels are compared with, and what is done where there are none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""Those that `gated` has."""


def clamped_swiglu_in_steps(gate_up_TF: Tensor, limit: float, alpha: float) -> Tensor:
    """`RowOperations.clamped_swiglu` by torch, where none is there, or gradients are wanted."""
    gate_TF, up_TF = gate_up_TF[:, 0::2].clamp(max=limit), gate_up_TF[:, 1::2].clamp(-limit, limit)
    return gate_TF * torch.sigmoid(gate_TF * alpha) * (up_TF + 1)


def gated_in_steps(gate_up_TF: Tensor, activation: str) -> Tensor:
    """`RowOperations.gated` by torch."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate_TF) * up_TF


def rms_norm_in_steps(x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
    """`RowOperations.rms_norm` by torch; one that `adds_one` is rounded at its end alone."""
    if adds_one:
        return F.rms_norm(widen(x), weight.shape, 1.0 + widen(weight), eps).to(x.dtype)
    return normed(x, eps).to(x.dtype) * weight


def normed(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dim, in float32 at least."""
    wide = widen(x)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def widen(x: Tensor) -> Tensor:
    """At least float32, so that norms of 16-bit values are not themselves rounded."""
    return x if x.dtype == torch.float64 else x.float()


def rotated_in_steps(x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`RowOperations.rotate_in_place` by torch, in other memory."""
    dim = cos.shape[-1]
    x = x_TNH if dim == x_TNH.shape[-1] else x_TNH[..., :dim]
    rotated = torch.addcmul(x * cos, x.roll(dim // 2, dims=-1), sin)
    return rotated if dim == x_TNH.shape[-1] else torch.cat((rotated, x_TNH[..., dim:]), dim=-1)


def gradients_in_steps(steps: Callable[..., Tensor], gradient: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Those of what torch's steps took in, by taking them once more."""
    with torch.enable_grad():
        inputs = tuple(x.detach().requires_grad_() for x in inputs)
        y = steps(*inputs)
    return torch.autograd.grad(y, inputs, gradient)
