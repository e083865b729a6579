"""`DoraFactors`: DoRA (Liu et al., 2402.09353) where nothing is learned: what each output of a linear is multiplied by.

W x becomes f (W + scale B A) x with f = m / ‖W + scale B A‖ of each row, so f is made once. Beside W x, which is there
for all rows of a batch, an adapter's rows get f scale B A x + (f - 1) W x, as PEFT has it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tllm.comm.collectives.group import Group
from tllm.parallel.linear import RowLinear
from tllm.parallel.lora.lora_update import DoraUpdate, squares_of_rows


class DoraFactors(nn.Module):
    """m of the outputs of one linear that `update` adapts, without values yet, and f once they and `update` have some.

    Each rank adds up the squares of the columns that it holds, when the adapter is loaded (`measure`). Where inputs are
    cut, the ranks that sum the linear's products, of `tp` if its own sum is left to others, add theirs together in the
    first batch that needs them: all of them compute that one.
    """

    def __init__(self, linear: nn.Module, update: DoraUpdate, tp: Group) -> None:
        super().__init__()
        self.m = nn.ParameterList(update.magnitudes())
        self.tp: Group | None = None
        if isinstance(linear, RowLinear):
            self.tp = tp if linear.seam is None else linear.seam.tp
        self.spans, self.outputs = update.spans, update.outputs
        self.squares_S: Tensor | None = None  # of the rows of all spans
        self.factor_F: Tensor | None = None

    @torch.no_grad()
    def measure(self, weight: Tensor, update: DoraUpdate) -> None:
        """Add up the squares of W + scale B A, in float32 at least; weights in few bits are what they stand for."""
        self.squares_S = squares_of_rows(weight, update)

    def forward(self) -> Tensor:
        """f, [outputs]: 1 for outputs that are not adapted."""
        if self.factor_F is None:
            self.factor_F = self._factor()
        return self.factor_F

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
