"""Batch invariance: products and functions of which a row has the same bits whatever other rows there are.

A product of torch sums in another order for another number of rows, so that a token's log-probability is rounded in
one way where its completion is sampled, a row at a time, and in another where it is learned from, with hundreds of
rows. Weights that are batch-invariant are multiplied by a kernel that sums in float64 and in one order.

The router of experts always is, and so are the softmax or sigmoid of its logits: another last bit of a score may choose
another expert, and all that follows is another. Without gradients these have the same bits on every processor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tllm.kernels.library import DTYPE_NUMBERS, Library, kernel_threads, kernels_for

SOFTMAX, SIGMOID = 0, 1
"""The kinds of scores, as in csrc/router.c."""

LINEAR = 20.0
"""Beyond it `softplus` is its argument."""


def make_batch_invariant(weights: Iterable[Tensor]) -> None:
    """Let products with these be so, where nothing is learned from them (without gradients)."""
    for weight in weights:
        weight.batch_invariant = True  # type: ignore[attr-defined]


def is_batch_invariant(weight: Tensor) -> bool:
    return getattr(weight, "batch_invariant", False)


def invariant_matmul(x_ND: Tensor, weight_FD: Tensor) -> Tensor:
    """x W^T in float32, where a kernel makes it: summed in float64 in one order, whatever other rows there are."""
    kernels = kernels_for(x_ND)
    return F.linear(x_ND, weight_FD) if kernels is None else router_matmul(kernels, x_ND, weight_FD)


def router_matmul(kernels: Library, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """x W^T in float32: summed in float64, and rounded once."""
    x_TD, weight_ED = x_TD.contiguous(), weight_ED.contiguous()
    (outputs, columns), rows = weight_ED.shape, len(x_TD)
    y_TE = torch.empty(rows, outputs, dtype=torch.float32)
    kernels.experts.router_matmul(
        weight_ED.data_ptr(),
        DTYPE_NUMBERS[weight_ED.dtype],
        outputs,
        columns,
        x_TD.data_ptr(),
        DTYPE_NUMBERS[x_TD.dtype],
        rows,
        y_TE.data_ptr(),
        kernel_threads(),
    )
    return y_TE


def heads_matmul(x_TNA: Tensor, weight_NBA: Tensor, batch_invariant: bool) -> Tensor:
    """x W^T of each head's rows and its own matrix: [T, N, B]."""
    if torch.is_grad_enabled() or not batch_invariant:
        return torch.einsum("tna,nba->tnb", x_TNA, weight_NBA)
    of_heads = zip(x_TNA.unbind(1), weight_NBA, strict=True)
    return torch.stack([invariant_matmul(x_TA, weight_BA) for x_TA, weight_BA in of_heads], 1).to(x_TNA.dtype)


def softmax(x: Tensor) -> Tensor:
    """Of each row, in x's dtype: torch's with gradients and where there is no kernel."""
    return _scores(x, SOFTMAX)


def sigmoid(x: Tensor) -> Tensor:
    """Of each number, likewise."""
    return _scores(x, SIGMOID)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), likewise."""
    return F.silu(x) if kernels_for(x) is None else x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) of each number, likewise: torch's own has other bits at the end of a tensor than inside it."""
    return F.softplus(x) if kernels_for(x) is None else torch.where(x > LINEAR, x, x.clamp(max=LINEAR).exp().log1p())


def _scores(x: Tensor, kind: int) -> Tensor:
    kernels = kernels_for(x)
    if kernels is None:
        return x.softmax(-1) if kind == SOFTMAX else x.sigmoid()
    wide = x.float().contiguous()
    y = torch.empty_like(wide)
    width = wide.shape[-1]
    kernels.experts.router_scores(wide.data_ptr(), wide.numel() // width, width, kind, y.data_ptr())
    return y.to(x.dtype)


def with_value(y: Tensor, value: Tensor) -> Tensor:
    """`value`, which is y rounded in another way, with the gradient of y."""
    return _WithValue.apply(y, value) if y.requires_grad else value  # type: ignore[no-untyped-call]


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
