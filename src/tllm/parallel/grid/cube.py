"""Products on a q x q x q cube (2105.14450): every rank gathers what it multiplies, and what it makes is scattered.

Rank (l, i, j). Going into a cut width F, tokens (i, j) of X are gathered along j, the parts i of W along i, and the
sum over l of the products is scattered by tokens (i, l). Out of it l and j change places. A backward pass is the same
with gradients, and what was gathered is gathered again, not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tllm.comm.collectives.group import Group
from tllm.parallel.collectives import gathered, scattered
from tllm.parallel.grid.grid import Grid


def cube_into(x_TD: Tensor, weight_FD: Tensor, grid: Grid, width: int) -> Tensor:
    """y_TF = x W^T: from tokens (i, j) and columns D_l to tokens (i, l) and F_j."""
    way = _Way(grid.row, grid.depth, grid.column, _parts(grid, width), dim=1)
    return _Cube.apply(x_TD, weight_FD, way)  # type: ignore[no-any-return, no-untyped-call]


def cube_out(x_TF: Tensor, weight_DF: Tensor, grid: Grid, width: int) -> Tensor:
    """y_TD = x W^T: from tokens (i, l) and columns F_j to tokens (i, j) and D_l."""
    way = _Way(grid.depth, grid.row, grid.column, _parts(grid, width), dim=0)
    return _Cube.apply(x_TF, weight_DF, way)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class _Way:
    """Along which axes a product gathers and scatters; `parts` of W lie along `dim` of it."""

    comes: Group
    leaves: Group
    weights: Group
    parts: list[int]
    dim: int

    def rows(self, x: Tensor, group: Group) -> Tensor:
        """The rows of a whole group, each rank having as many."""
        return gathered(x, group, [len(x)] * group.size)

    def sum_rows(self, x: Tensor, group: Group) -> Tensor:
        return scattered(x, group, [len(x) // group.size] * group.size)

    def weight(self, part: Tensor) -> Tensor:
        return gathered(part, self.weights, self.parts, self.dim)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        ctx.save_for_backward(x, weight)
        return way.sum_rows(F.linear(way.rows(x, way.comes), way.weight(weight)), way.leaves)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), way = ctx.saved_tensors, ctx.way
        gradient = way.rows(gradient, way.leaves)
        of_x = way.sum_rows(torch.matmul(gradient, way.weight(weight)), way.comes)
        of_weight = torch.mm(gradient.t(), way.rows(x, way.comes))
        return of_x, scattered(of_weight, way.weights, way.parts, way.dim).contiguous(), None


def _parts(grid: Grid, width: int) -> list[int]:
    return [stop - start for start, stop in grid.weight_ranges(width)]
