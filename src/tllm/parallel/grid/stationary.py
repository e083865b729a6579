"""Layers on a grid whose weights stay where they are, which is how a grid serves.

A batch that is served has few tokens beside the width of a model, so that SUMMA would send more of weights than there
is of anything else. Here activations travel instead: the two-dimensional weight-stationary layout of "Efficiently
Scaling Transformer Inference" (2211.05102, section 3.2.2). Each rank has the same block of each weight as in training,
and of all tokens

    hidden states            its part of D         alike on the ranks of its row
    heads, MLP width, logits its part F_j          alike on the ranks that have F_j

Into a cut width each rank multiplies what it has, and those with the same F_j (`Grid.width`) sum; out of it those of a
row do. A cube is a grid with its D cut side x side ways.
"""

from __future__ import annotations

from torch import nn

from tllm.parallel.collectives import reduce_from
from tllm.parallel.embedding import VocabEmbedding
from tllm.parallel.grid.grid import Grid
from tllm.parallel.grid.layers import GridLogits, matrix_shard, with_columns
from tllm.parallel.linear import LinearRows, RowLinear, matmul, stacked
from tllm.parallel.mesh import CutLayers
from tllm.parallel.sequence_parallel import TensorParallelRegion
from tllm.parallel.shard import Shard, ShardPiece, cut_parameter
from tllm.spec.cut import Range, size


class BlockLinear(RowLinear):
    """y = sum over the ranks of a region of x W^T, + b, where each has a block of W."""

    def __init__(self, shape: tuple[int, int], weight: Shard, bias: Shard | None, region: TensorParallelRegion) -> None:
        nn.Module.__init__(self)
        self.weight = cut_parameter(shape, weight)
        self.bias = None if bias is None else cut_parameter(shape[:1], bias)
        self.seam = region


class StationaryLayers(CutLayers):
    """`CutLayers` on a grid that serves a model with hidden states of `width`."""

    def __init__(self, grid: Grid, width: int) -> None:
        super().__init__(TensorParallelRegion(grid.row))
        self.grid, self.held, self.inward = grid, grid.weight_range(width), TensorParallelRegion(grid.width)

    def column(self, width: int, rows: list[LinearRows], bias: bool = False, replicated: bool = False) -> BlockLinear:
        outputs = sum(part.stop - part.start for part in rows)
        weight = with_columns(stacked(rows, "weight", replicated or self.grid.shares_weights, width), self.held)
        shape = (outputs, size(self.held))
        return BlockLinear(shape, weight, stacked(rows, "bias", True) if bias else None, self.inward)

    def row(self, name: str, columns: Range, width: int, bias: bool = False) -> BlockLinear:
        assert self.seam is not None, "made with one"
        weight = matrix_shard(f"{name}.weight", self.held, columns, self.grid.shares_weights)
        of_bias = Shard((ShardPiece(f"{name}.bias", source=(self.held,)),), True) if bias else None
        return BlockLinear((size(self.held), size(columns)), weight, of_bias, self.seam)

    def table(self, name: str, vocab: Range, width: int, replicated: bool = False) -> nn.Parameter:
        shard = matrix_shard(name, vocab, self.held, replicated or self.grid.shares_weights)
        return cut_parameter((size(vocab), size(self.held)), shard)

    def embedding(self, table: nn.Parameter, vocab: Range, scale: float) -> VocabEmbedding:
        assert self.seam is not None, "made with one"
        return VocabEmbedding(table, vocab, self.seam, scale)

    def logits(self, table: nn.Parameter, vocab: Range, softcap: float | None, scaling: float) -> GridLogits:
        whole = self.grid.width
        return GridLogits(table, vocab, softcap, scaling, lambda x_TD, part: reduce_from(matmul(x_TD, part), whole))
