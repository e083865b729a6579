"""Products on a q x q grid by SUMMA (van de Geijn and Watts, 1997): panels go along rows and columns, one at a time.

No rank ever has more than one panel of another. With X_it the block of row i and column t, and so of the others:

    into a cut width    Y_ij = sum over t of X_it W_jt^T    X_it goes along row i, W_jt along column j
                        dX_it = sum over j of dY_ij W_jt    W_jt goes along column j, the sum along row i to column t
                        dW_jt = sum over i of dY_ij^T X_it  X_it goes along row i, the sum along column j to row t
    out of it           Y_iv = sum over j of X_ij W_vj^T    W_vj goes along column j, the sum along row i to column v
                        dX_ij = sum over v of dY_iv W_vj    dY_iv goes along row i, W_vj along column j
                        dW_vj = sum over i of dY_iv^T X_ij  the sum goes along column j to row v

Only blocks of the width D (t and v above) travel along rows, never of the width between, which is the larger one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tllm.comm.collectives.group import Group
from tllm.parallel.grid.grid import Grid


def summa_into(x_TD: Tensor, weight_FD: Tensor, grid: Grid, width: int) -> Tensor:
    """y_TF = x W^T for hidden states of `width` columns in all, of which this rank has a block, and a block of W."""
    return _Into.apply(x_TD, weight_FD, grid, width)  # type: ignore[no-any-return, no-untyped-call]


def summa_out(x_TF: Tensor, weight_DF: Tensor, grid: Grid, width: int) -> Tensor:
    """y_TD = x W^T, this rank's columns of the `width` of hidden states."""
    return _OutOf.apply(x_TF, weight_DF, grid, width)  # type: ignore[no-any-return, no-untyped-call]


class _Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_FD: Tensor, grid: Grid, width: int) -> Tensor:
        ctx.grid, ctx.sizes = grid, _sizes(grid, width)
        ctx.save_for_backward(x_TD, weight_FD)
        rows, outputs = len(x_TD), len(weight_FD)
        y_TF = _zeros(x_TD, rows, outputs)
        for t, size in enumerate(ctx.sizes):
            x_TP = panel(x_TD, grid.row, t, (rows, size))
            y_TF += F.linear(x_TP, panel(weight_FD, grid.column, t, (outputs, size)))
        return y_TF.to(x_TD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TF: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_TD, weight_FD = ctx.saved_tensors
        grid, rows, outputs = ctx.grid, len(x_TD), len(weight_FD)
        of_x, of_weight = torch.empty_like(x_TD), torch.empty_like(weight_FD)
        for t, size in enumerate(ctx.sizes):
            weight_FP = panel(weight_FD, grid.column, t, (outputs, size))
            collect(torch.matmul(gradient_TF, weight_FP), grid.row, t, of_x)
            x_TP = panel(x_TD, grid.row, t, (rows, size))
            collect(torch.mm(gradient_TF.t(), x_TP), grid.column, t, of_weight)
        return of_x, of_weight, None, None


class _OutOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, weight_DF: Tensor, grid: Grid, width: int) -> Tensor:
        ctx.grid, ctx.sizes = grid, _sizes(grid, width)
        ctx.save_for_backward(x_TF, weight_DF)
        y_TD = x_TF.new_empty(len(x_TF), ctx.sizes[grid.row.rank])
        for v, size in enumerate(ctx.sizes):
            weight_PF = panel(weight_DF, grid.column, v, (size, weight_DF.shape[1]))
            collect(F.linear(x_TF, weight_PF), grid.row, v, y_TD)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_TF, weight_DF = ctx.saved_tensors
        grid = ctx.grid
        of_x, of_weight = _zeros(x_TF, *x_TF.shape), torch.empty_like(weight_DF)
        for v, size in enumerate(ctx.sizes):
            gradient_TP = panel(gradient_TD, grid.row, v, (len(x_TF), size))
            of_x += torch.matmul(gradient_TP, panel(weight_DF, grid.column, v, (size, weight_DF.shape[1])))
            collect(torch.mm(gradient_TP.t(), x_TF), grid.column, v, of_weight)
        return of_x.to(x_TF.dtype), of_weight, None, None


def panel(mine: Tensor, group: Group, root: int, shape: tuple[int, int]) -> Tensor:
    """The block of rank `root` of the group, which has this shape; it broadcasts it."""
    sent = mine.detach().contiguous() if group.rank == root else mine.new_empty(shape)
    return group.broadcast(sent, root)


def collect(part: Tensor, group: Group, root: int, out: Tensor) -> None:
    """`out` becomes the sum of the ranks' parts on rank `root` of the group, and stays as it is on others."""
    total = group.reduce(part, root)
    if group.rank == root:
        out.copy_(total)


def _sizes(grid: Grid, width: int) -> list[int]:
    return [stop - start for start, stop in grid.weight_ranges(width)]


def _zeros(like: Tensor, rows: int, columns: int) -> Tensor:
    """Sums of panels are added up in float32 at least."""
    return like.new_zeros(rows, columns, dtype=torch.promote_types(like.dtype, torch.float32))
