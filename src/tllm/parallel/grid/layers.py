"""Linears, embedding and logits on a grid of ranks: as in `parallel.linear`, with the hidden width cut too.

What a rank computes of them counts for its own tokens, so gradients of biases (and of weights that several layers of
the grid have) are parts, to be summed over those who hold the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tllm.parallel.embedding import VocabLogits, ids_held
from tllm.parallel.grid.cube import cube_into, cube_out
from tllm.parallel.grid.grid import Grid
from tllm.parallel.grid.summa import summa_into, summa_out
from tllm.parallel.linear import Adapt, LinearRows, stacked, unadapted
from tllm.parallel.mesh import CutLayers
from tllm.parallel.sequence_parallel import TensorParallelRegion
from tllm.parallel.shard import Gradient, Shard, ShardPiece, cut_parameter
from tllm.spec.cut import Range


class Product(Protocol):
    """(x, this rank's part of W, the grid, the width D) -> this rank's part of x W^T."""

    def __call__(self, x: Tensor, weight: Tensor, grid: Grid, width: int, /) -> Tensor: ...


class GridRegion(TensorParallelRegion):
    """On a grid nothing is done where rows enter cut layers or leave them: the products bring their input themselves.

    Hidden states are of this rank's tokens and columns.
    """

    gradient: Gradient = "partial"
    has_all_rows = False

    def enter(self, x_TD: Tensor, tokens: int | None) -> Tensor:
        return x_TD

    def leave(self, y_TD: Tensor) -> Tensor:
        raise AssertionError("on a grid a product's sum is a part of it")


class GridColumnLinear(nn.Module):
    """y_TF = x_TD W^T + b: this rank has some of W's rows, and of these the columns of its part of D."""

    def __init__(self, width: int, rows: list[LinearRows], bias: bool, replicated: bool, grid: Grid) -> None:
        super().__init__()
        size, held = sum(part.stop - part.start for part in rows), grid.weight_range(width)
        shard = with_columns(stacked(rows, "weight", replicated or grid.shares_weights, width), held)
        self.weight = cut_parameter((size, held[1] - held[0]), shard)
        self.bias = cut_parameter((size,), stacked(rows, "bias", True)) if bias else None
        self.grid, self.width, self.product = grid, width, products(grid)[0]

    def forward(self, x_TD: Tensor, adapt: Adapt = unadapted) -> Tensor:
        y_TF = adapt(self, x_TD, self.product(x_TD, self.weight, self.grid, self.width))
        return y_TF if self.bias is None else y_TF + self.bias


class GridRowLinear(nn.Module):
    """y_TD = x_TF W^T + b: this rank has the columns of W that its part of x meets, and of these the rows of its part
    of D."""

    def __init__(self, name: str, columns: Range, width: int, bias: bool, grid: Grid) -> None:
        super().__init__()
        held, here = grid.weight_range(width), grid.hidden_range(width)
        self.weight = cut_parameter(
            (held[1] - held[0], columns[1] - columns[0]),
            matrix_shard(f"{name}.weight", held, columns, grid.shares_weights),
        )
        piece = ShardPiece(f"{name}.bias", source=(here,))
        self.bias = cut_parameter((here[1] - here[0],), Shard((piece,), True, "partial")) if bias else None
        self.grid, self.width, self.product = grid, width, products(grid)[1]

    def forward(self, x_TF: Tensor, adapt: Adapt = unadapted) -> Tensor:
        y_TD = adapt(self, x_TF, self.product(x_TF, self.weight, self.grid, self.width))
        return y_TD if self.bias is None else y_TD + self.bias


class GridEmbedding(nn.Module):
    """x_TD = scale * table[ids_T], for this rank's tokens and columns.

    `ids_T` are those of all blocks that this rank looks up (`Grid.looked_up`), in the part of the table that it has.
    """

    def __init__(self, table: nn.Parameter, vocab: Range, width: int, grid: Grid, scale: float) -> None:
        super().__init__()
        self.weight = table
        self.vocab, self.scale = vocab, scale
        self.grid, self.width = grid, width

    def forward(self, ids_T: Tensor, adapt: Adapt = unadapted) -> Tensor:
        here_T, local_T = ids_held(ids_T, self.vocab)
        part_TD = F.embedding(local_T, self.weight) * here_T.unsqueeze(-1)
        x_TD = _Dealt.apply(part_TD, self.grid, self.width)  # type: ignore[no-untyped-call]
        if self.scale != 1.0:  # in the weights' own dtype, as the models that scale were trained
            x_TD = x_TD * torch.tensor(self.scale, dtype=x_TD.dtype)
        return adapt(self, ids_T, x_TD)


class GridLogits(VocabLogits):
    """Logits of this rank's part of the vocabulary, for the tokens that it has inside of cut layers."""

    def __init__(
        self,
        table: nn.Parameter,
        vocab: Range,
        softcap: float | None,
        scaling: float,
        product: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__(table, vocab, softcap, scaling)
        self.product = product

    def matmul(self, x_TD: Tensor) -> Tensor:
        return self.product(x_TD, self.weight)


class GridLayers(CutLayers):
    """`CutLayers` on a grid, of a model with hidden states of `width`."""

    def __init__(self, grid: Grid, width: int) -> None:
        super().__init__(GridRegion(grid.row))
        self.grid, self.width = grid, width

    def column(
        self, width: int, rows: list[LinearRows], bias: bool = False, replicated: bool = False
    ) -> GridColumnLinear:
        return GridColumnLinear(width, rows, bias, replicated, self.grid)

    def row(self, name: str, columns: Range, width: int, bias: bool = False) -> GridRowLinear:
        return GridRowLinear(name, columns, width, bias, self.grid)

    def table(self, name: str, vocab: Range, width: int, replicated: bool = False) -> nn.Parameter:
        held = self.grid.weight_range(width)
        shard = matrix_shard(name, vocab, held, replicated or self.grid.shares_weights)
        return cut_parameter((vocab[1] - vocab[0], held[1] - held[0]), shard)

    def embedding(self, table: nn.Parameter, vocab: Range, scale: float) -> GridEmbedding:
        return GridEmbedding(table, vocab, self.width, self.grid, scale)

    def logits(self, table: nn.Parameter, vocab: Range, softcap: float | None, scaling: float) -> GridLogits:
        into, _ = products(self.grid)
        return GridLogits(table, vocab, softcap, scaling, lambda x_TD, part: into(x_TD, part, self.grid, self.width))


def products(grid: Grid) -> tuple[Product, Product]:
    """Into a width that is cut along the rows of the grid, and out of it."""
    return (cube_into, cube_out) if grid.shape.mode == "3d" else (summa_into, summa_out)


class _Dealt(torch.autograd.Function):
    """Every block of what was looked up goes to the rank that has its tokens, who adds the vocabulary's parts."""

    @staticmethod
    def forward(ctx: Any, part_TD: Tensor, grid: Grid, width: int) -> Tensor:
        takers, givers = grid.takers(), grid.givers(width)
        rows = len(part_TD) // len(takers)
        ctx.grid, ctx.takers, ctx.givers, ctx.part = grid, takers, givers, part_TD.shape
        sends = dict(zip(takers, torch.split(part_TD.detach(), rows), strict=True))
        came = _exchanged(grid, sends, {giver: (rows, stop - start) for giver, (start, stop) in givers})
        start, stop = grid.hidden_range(width)
        x_TD = part_TD.new_zeros(rows, stop - start)
        for giver, (first, last) in givers:
            x_TD[:, first:last] += came[giver]
        return x_TD

    @staticmethod
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor, None, None]:
        rows, columns = ctx.part[0] // len(ctx.takers), ctx.part[1]
        sends = {giver: gradient_TD[:, first:last] for giver, (first, last) in ctx.givers}
        came = _exchanged(ctx.grid, sends, dict.fromkeys(ctx.takers, (rows, columns)))
        return torch.cat([came[taker] for taker in ctx.takers]), None, None


def _exchanged(grid: Grid, sends: dict[int, Tensor], shapes: dict[int, tuple[int, int]]) -> dict[int, Tensor]:
    """What came from each rank of `shapes`; a rank sends itself nothing, and has it."""
    mine, some = grid.stage.rank, next(iter(sends.values()))
    given = {peer: x.detach().contiguous() for peer, x in sends.items()}
    came = {peer: some.new_empty(shape) for peer, shape in shapes.items() if peer != mine}
    grid.stage.exchange({peer: x for peer, x in given.items() if peer != mine}, came)
    return {**came, mine: given[mine]} if mine in shapes else came


def matrix_shard(name: str, rows: Range, columns: Range, replicated: bool) -> Shard:
    """The block of these rows and columns of a weight."""
    piece = ShardPiece(name, source=(rows, columns))
    return Shard((piece,), replicated, "partial" if replicated else "whole")


def with_columns(shard: Shard, columns: Range) -> Shard:
    """The same rows, of these columns alone."""
    size = (0, columns[1] - columns[0])
    pieces = (replace(p, source=(p.source[0], columns), target=(p.target[0], size)) for p in shard.pieces)
    return replace(shard, pieces=tuple(pieces))
