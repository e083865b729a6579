"""Root-mean-square norms (1910.07467), over a width that is whole or cut between ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tllm.comm.collectives.group import Group
from tllm.kernels.rows.row_operations import row_operations
from tllm.kernels.rows.torch_steps import normed, rms_norm_in_steps, widen
from tllm.parallel.collectives import copy_to, reduce_from
from tllm.parallel.mesh import HiddenColumns
from tllm.parallel.shard import Gradient, Shard, ShardPiece, cut_parameter
from tllm.spec.cut import Range


class RMSNorm(nn.Module):
    """y = w * x / sqrt(mean(x²) + eps) over the last dim, the mean in float32; with `offset`: 1 + w, all float32."""

    def __init__(
        self, name: str, width: int, eps: float, gradient: Gradient, offset: bool = False, tensor: str = "weight"
    ) -> None:
        super().__init__()
        self.weight = cut_parameter((width,), Shard((ShardPiece(f"{name}.{tensor}"),), True, gradient))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        if fused := row_operations(x):
            return fused.rms_norm(x, self.weight, self.eps, self.offset)
        return rms_norm_in_steps(x, self.weight, self.eps, self.offset)


def add_and_norm(norm: nn.Module, x_TD: Tensor, y_TD: Tensor) -> tuple[Tensor, Tensor]:
    """x + y and its norm: the residual, and what the next part of a layer reads; in one pass where there is one."""
    if isinstance(norm, RMSNorm) and (fused := row_operations(x_TD)):
        return fused.add_and_norm(x_TD, y_TD, norm.weight, norm.eps, norm.offset)
    x_TD = x_TD + y_TD
    return x_TD, norm(x_TD)


class HiddenRMSNorm(nn.Module):
    """RMSNorm of hidden states whose columns are cut between ranks: the ranks sum their squares."""

    def __init__(self, name: str, width: int, columns: HiddenColumns, eps: float, offset: bool = False) -> None:
        super().__init__()
        first, last = columns.held
        piece = ShardPiece(f"{name}.weight", source=(columns.held,))
        self.weight = cut_parameter((last - first,), Shard((piece,), True, "partial"))
        self.width, self.group = width, columns.group
        self.eps = eps
        self.offset = offset

    def forward(self, x_TD: Tensor) -> Tensor:
        wide = widen(x_TD)
        squares_T1 = copy_to(reduce_from(wide.square().sum(-1, keepdim=True), self.group), self.group)
        normed_TD = wide * torch.rsqrt(squares_T1 / self.width + self.eps)
        if self.offset:
            return (normed_TD * (1.0 + widen(self.weight))).to(x_TD.dtype)
        return normed_TD.to(x_TD.dtype) * self.weight


class RootMeanSquare(nn.Module):
    """y = x / sqrt(mean(x²) + eps) over the last dim, the mean in float32: a norm that has no weight."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.eps).to(x.dtype)


class CutRMSNorm(nn.Module):
    """RMSNorm over the width of all heads together, which are cut between ranks: the ranks sum their squares.

    `counted` are the heads whose squares this rank adds, so that a head that two ranks have counts once. x is
    [T, heads, H].
    """

    def __init__(
        self, name: str, heads: Range, counted: Range, total: int, head_dim: int, eps: float, tp: Group
    ) -> None:
        super().__init__()
        first, last = heads[0] * head_dim, heads[1] * head_dim
        piece = ShardPiece(f"{name}.weight", source=((first, last),))
        shared = counted != heads
        self.weight = cut_parameter((last - first,), Shard((piece,), shared or tp.size > 1, "partial"))
        self.counted = slice(counted[0] - heads[0], counted[1] - heads[0])
        self.width = total * head_dim
        self.eps = eps
        self.tp = tp

    def forward(self, x_TNH: Tensor) -> Tensor:
        wide = widen(x_TNH)
        squares_T = copy_to(reduce_from(wide[:, self.counted].square().sum((1, 2)), self.tp), self.tp)
        normed = wide * torch.rsqrt(squares_T / self.width + self.eps)[:, None, None]
        return normed.to(x_TNH.dtype) * self.weight.view(x_TNH.shape[1:])
