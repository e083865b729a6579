"""Linear layers that are cut when built: by columns of the output (`ColumnLinear`) or rows of the input (`RowLinear`).

Megatron-LM (1909.08053), section 3: a column-cut layer, something elementwise, a row-cut layer, one sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tllm.kernels.batch_invariant import heads_matmul, invariant_matmul, is_batch_invariant, router_matmul
from tllm.kernels.float_product import float_matmul
from tllm.kernels.gpu_kernels import gpu_kernels
from tllm.kernels.library import is_torch_held, kernels_for
from tllm.kernels.training.training_matmul import training_matmul
from tllm.parallel.expert_dispatch import ExpertRows
from tllm.parallel.quantized_weight import QuantizedWeight, quantized
from tllm.parallel.sequence_parallel import TensorParallelRegion
from tllm.parallel.shard import Gradient, Shard, ShardPiece, cut_parameter
from tllm.spec.cut import Range


@dataclass(frozen=True)
class LinearRows:
    """Rows [start, stop) of the weight [outputs, inputs] of the checkpoint's linear `name`."""

    name: str
    start: int
    stop: int


class Adapt(Protocol):
    """(a linear, its rows x_TD, y_TF = x_TD W^T) -> y_TF with what adapters add for some of the rows.

    Of a linear whose result is a part of a sum over ranks, so is what is added. `y_TF` may be written to. Of a product
    of experts, `rows` say which expert and which of the batch's tokens each row is of.
    """

    def __call__(self, linear: nn.Module, x_TD: Tensor, y_TF: Tensor, rows: ExpertRows | None = None) -> Tensor: ...


def unadapted(linear: nn.Module, x_TD: Tensor, y_TF: Tensor, rows: ExpertRows | None = None) -> Tensor:
    """The model's own weights and nothing else."""
    return y_TF


def matmul(x_TD: Tensor, weight: Tensor | QuantizedWeight) -> Tensor:
    """x W^T: with weights of few bits as they are packed, else by the product that is fastest here.

    Without gradients, that of batch-invariant weights has rows that do not depend on each other. None is measured where
    a deterministic run computes.
    """
    packed = weight if isinstance(weight, QuantizedWeight) else quantized(weight)
    if packed is not None:
        return packed.matmul(x_TD)
    assert isinstance(weight, Tensor)
    if torch.is_grad_enabled():
        return training_matmul(x_TD, weight)
    if not x_TD.is_cpu:
        gpu = gpu_kernels(x_TD.device.type)
        return F.linear(x_TD, weight) if gpu is None else gpu.products.matmul(x_TD, weight)
    if is_batch_invariant(weight):
        return invariant_matmul(x_TD, weight).to(x_TD.dtype)
    return training_matmul(x_TD, weight) if is_torch_held() else float_matmul(x_TD, weight)


def heads_product(x_TNA: Tensor, weight_NBA: Tensor, batch_invariant: bool) -> Tensor:
    """x W^T of each head's rows and its own matrix: [T, N, B]."""
    if not is_torch_held() or (batch_invariant and not torch.is_grad_enabled()):
        return heads_matmul(x_TNA, weight_NBA, batch_invariant)
    of_heads = zip(x_TNA.unbind(1), weight_NBA, strict=True)
    return torch.stack([training_matmul(x_TA, weight_BA) for x_TA, weight_BA in of_heads], 1)


class ColumnLinear(nn.Module):
    """y_TF = x_TD W^T + b, where this rank holds some of W's rows, of one linear or of several merged.

    x_TD must have come through `TensorParallelRegion.enter`, whose backward pass sums the gradients of all ranks.
    `replicated`: other ranks may have the same rows and each uses them for something of its own, so that a rank's
    gradient of these rows is a part, to be summed.
    """

    def __init__(self, width: int, rows: list[LinearRows], bias: bool = False, replicated: bool = False) -> None:
        super().__init__()
        size = sum(part.stop - part.start for part in rows)
        self.weight = cut_parameter((size, width), stacked(rows, "weight", replicated, width))
        self.bias = cut_parameter((size,), stacked(rows, "bias", replicated)) if bias else None

    def forward(self, x_TD: Tensor, adapt: Adapt = unadapted) -> Tensor:
        y_TF = adapt(self, x_TD, matmul(x_TD, self.weight))
        return y_TF if self.bias is None else y_TF + self.bias


class RouterLinear(ColumnLinear):
    """A linear that every rank has whole, and that decides: its logits, in float32 where a kernel makes them.

    They have the same bits on every processor then, for any number of rows.
    """

    def __init__(self, width: int, name: str, outputs: int, bias: bool = False) -> None:
        super().__init__(width, [LinearRows(name, 0, outputs)], bias, replicated=True)

    def forward(self, x_TD: Tensor, adapt: Adapt = unadapted) -> Tensor:
        kernels = kernels_for(x_TD)
        if kernels is None or quantized(self.weight) is not None:
            return super().forward(x_TD)
        y_TE = router_matmul(kernels, x_TD, self.weight)
        return y_TE if self.bias is None else y_TE + self.bias


class WholeLinear(nn.Module):
    """y_TF = x_TD W^T of rows outside of the cut layers, with rows [start, stop) of W whole on every rank.

    `gradient` is that of the region's parameters (`TensorParallelRegion.gradient`).
    """

    def __init__(self, name: str, rows: Range, width: int, gradient: Gradient) -> None:
        super().__init__()
        piece = ShardPiece(f"{name}.weight", source=(rows, (0, width)))
        self.weight = cut_parameter((rows[1] - rows[0], width), Shard((piece,), True, gradient))

    def forward(self, x_TD: Tensor) -> Tensor:
        return matmul(x_TD, self.weight)


class HeadLinear(nn.Module):
    """y_TNB = x_TNA W_n^T for each head n, or with `is_transposed` x_TNA W_n, of heads [first, last) held here.

    The linear `name` of `width` inputs has `each` outputs for a head, of which W_n, [B, width], are `rows`. They are
    used otherwise than in products of the linear's own inputs, and held as plain numbers.

    What the linear's inputs are mixed to may have further columns, which an adapter asked for (`HeadInputs`).
    """

    def __init__(self, name: str, heads: Range, each: int, rows: Range, width: int, is_transposed: bool) -> None:
        super().__init__()
        self.name, self.heads, self.each, self.rows, self.is_transposed = name, heads, each, rows, is_transposed
        (first, last), every = rows, (0, width)
        inside = (0, last - first), every
        pieces = [
            ShardPiece(f"{name}.weight", ((head * each + first, head * each + last), every), ((at, at + 1), *inside))
            for at, head in enumerate(range(*heads))
        ]
        self.weight = cut_parameter((len(pieces), last - first, width), Shard(tuple(pieces), plain=True))

    def forward(self, x_TNA: Tensor, adapt: Adapt = unadapted) -> Tensor:
        if self.is_transposed:
            return adapt(self, x_TNA, self.product(x_TNA))
        return adapt(self, x_TNA, self.product(x_TNA[..., : self.weight.shape[2]]))

    def product(self, x_TNA: Tensor) -> Tensor:
        """What the weights alone give."""
        weight = self.weight.transpose(1, 2) if self.is_transposed else self.weight
        return heads_product(x_TNA, weight, is_batch_invariant(self.weight))


class HeadInputs(nn.Module):
    """x_TA, the inputs of the linear `name`, which are mixed before `HeadLinear`s multiply what that gives.

    An adapter that sees other inputs than the linear, some of them dropped, puts these behind the linear's own; queries
    then have columns that meet them.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x_TA: Tensor, adapt: Adapt = unadapted) -> Tensor:
        return adapt(self, x_TA, x_TA)


class RowLinear(nn.Module):
    """y_TD = sum over ranks of x_TF W^T, + b: each rank holds the columns of W that its part of x meets.

    Without a `seam` the sum is left to the caller, who adds other partial sums first. Those of weights in few bits are
    in float64 and exact.
    """

    def __init__(
        self, name: str, columns: Range, width: int, seam: TensorParallelRegion | None, bias: bool = False
    ) -> None:
        super().__init__()
        start, stop = columns
        piece = ShardPiece(f"{name}.weight", source=((0, width), (start, stop)))
        self.weight = cut_parameter((width, stop - start), Shard((piece,)))
        assert seam is not None or not bias, "a bias would be added once for each rank"
        self.bias: nn.Parameter | None = None
        if seam is not None and bias:
            self.bias = cut_parameter((width,), Shard((ShardPiece(f"{name}.bias"),), True, seam.gradient))
        self.seam = seam

    def forward(self, x_TF: Tensor, adapt: Adapt = unadapted) -> Tensor:
        packed = quantized(self.weight)
        y_TD = matmul(x_TF, self.weight) if packed is None else packed.matmul(x_TF, exact=True)
        y_TD = adapt(self, x_TF, y_TD)
        if self.seam is not None:
            y_TD = self.seam.leave(y_TD).to(x_TF.dtype)
        return y_TD if self.bias is None else y_TD + self.bias


def stacked(rows: list[LinearRows], kind: str, replicated: bool, width: int | None = None) -> Shard:
    """The shard of a weight of `width` columns, or of a bias, that is made of these rows one after another."""
    pieces, at = [], 0
    for part in rows:
        size = part.stop - part.start
        across = () if width is None else ((0, width),)
        pieces.append(
            ShardPiece(
                f"{part.name}.{kind}", source=((part.start, part.stop), *across), target=((at, at + size), *across)
            )
        )
        at += size
    return Shard(tuple(pieces), replicated, "partial" if replicated else "whole")
