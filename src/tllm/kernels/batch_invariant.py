"""Products of which a row has the same bits whatever other rows are computed beside it: batch invariance.

A product of torch sums in another order for another number of rows, so that a token's log-probability is rounded in
one way where its completion is sampled, a row at a time, and in another where it is learned from, with hundreds of
rows. Weights that are batch-invariant are multiplied by a kernel that sums in float64 and in one order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tllm.kernels.router import router_matmul
from tllm.kernels.row_operations import takes


def make_batch_invariant(weights: Iterable[Tensor]) -> None:
    """Let products with these be so, where nothing is learned from them (without gradients)."""
    for weight in weights:
        weight.batch_invariant = True  # type: ignore[attr-defined]


def is_batch_invariant(weight: Tensor) -> bool:
    return getattr(weight, "batch_invariant", False)


def invariant_matmul(x_ND: Tensor, weight_FD: Tensor) -> Tensor:
    """x W^T in float32, where a kernel makes it: summed in float64 in one order, whatever other rows there are."""
    kernels = takes(x_ND)
    return F.linear(x_ND, weight_FD) if kernels is None else router_matmul(kernels, x_ND, weight_FD)


def heads_matmul(x_TNA: Tensor, weight_NBA: Tensor, batch_invariant: bool) -> Tensor:
    """x W^T of each head's rows and its own matrix: [T, N, B]."""
    if torch.is_grad_enabled() or not batch_invariant:
        return torch.einsum("tna,nba->tnb", x_TNA, weight_NBA)
    of_heads = zip(x_TNA.unbind(1), weight_NBA, strict=True)
    return torch.stack([invariant_matmul(x_TA, weight_BA) for x_TA, weight_BA in of_heads], 1).to(x_TNA.dtype)


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
