"""`DoraFactors`: DoRA (Liu et al., 2402.09353) where nothing is learned: what each output of a linear is multiplied by.

W x becomes f (W + scale B A) x with f = m / ‖W + scale B A‖ of each row, so f is made once. Beside W x, which is there
for all rows of a batch, an adapter's rows get f scale B A x + (f - 1) W x, as PEFT has it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tllm.comm.collectives.group import Group
from tllm.parallel.linear import RowLinear
from tllm.parallel.lora import LoraUpdate, magnitude_parameters, rescaled
from tllm.parallel.quantized_weight import quantized

ELEMENTS_AT_ONCE = 2**22
"""Of a weight that are summed at once, beside those that are held."""


class DoraFactors(nn.Module):
    """m of the outputs of one linear that `update` adapts, without values yet, and f once they and `update` have some.

    Each rank adds up the squares of the columns that it holds, when the adapter is loaded (`measure`). Where inputs are
    cut, the ranks `tp` add theirs together in the first batch that needs them: all of them compute that one.
    """

    def __init__(self, linear: nn.Module, update: LoraUpdate, tp: Group) -> None:
        super().__init__()
        self.m = nn.ParameterList(magnitude_parameters(update))
        self.tp = tp if isinstance(linear, RowLinear) else None
        self.spans, self.outputs = update.spans, update.outputs
        self.squares_S: Tensor | None = None  # of the rows of all spans
        self.factor_F: Tensor | None = None

    @torch.no_grad()
    def measure(self, weight: Tensor, update: LoraUpdate) -> None:
        """Add up the squares of W + scale B A, in float32 at least; weights in few bits are what they stand for."""
        sums = list[Tensor]()
        for span, b in zip(update.spans, update.B, strict=True):
            a = update.A[span.first : span.last]
            wide = torch.promote_types(a.dtype, torch.float32)
            at_once = max(1, ELEMENTS_AT_ONCE // a.shape[1])
            for start in range(span.start, span.stop, at_once):
                stop = min(start + at_once, span.stop)
                some = _rows(weight, start, stop).to(wide)
                added = b[start - span.start : stop - span.start].to(wide) @ a.to(wide)
                sums.append(some.add(added, alpha=span.scale).square_().sum(1))
        self.squares_S = torch.cat(sums)

    def forward(self, added_NF: Tensor, product_NF: Tensor) -> Tensor:
        """What rows get beside W x in all, of scale B A x and of W x; of partial sums, their parts of it."""
        if self.factor_F is None:
            self.factor_F = self._factor()
        return rescaled(self.factor_F, added_NF, product_NF)

    @torch.no_grad()
    def _factor(self) -> Tensor:
        assert self.squares_S is not None, "it was measured when it was loaded"
        squares_S, self.squares_S = self.squares_S, None
        if self.tp is not None and self.tp.size > 1:
            squares_S = self.tp.all_reduce(squares_S)
        factor_F, at = squares_S.new_ones(self.outputs), 0
        for span, m in zip(self.spans, self.m, strict=True):
            rows = slice(at, at := at + span.stop - span.start)
            factor_F[span.start : span.stop] = m / squares_S[rows].sqrt()
        return factor_F


def _rows(weight: Tensor, start: int, stop: int) -> Tensor:
    packed = quantized(weight)
    if packed is None:
        return weight[start:stop]
    return packed.rows(torch.arange(start, stop, device=weight.device))
