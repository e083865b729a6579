"""DoRA (Liu et al., 2402.09353): a magnitude of each output, learned apart from the direction that LoRA changes.

W x becomes m / ‖W + scale B A‖ (W + scale B A) x with the norm of each row, which counts as a constant in the backward
pass (section 4.3 of the paper), as in PEFT. Weights in few bits are the numbers that they stand for.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tllm.comm.collectives.group import Group
from tllm.parallel.linear import RowLinear
from tllm.parallel.lora.lora_update import DoraUpdate, squares_of_rows


class Magnitudes(nn.Module):
    """m of the outputs of one linear that `update` adapts, cut as the rows of B are, without values.

    Where the linear's inputs are cut, every rank has m of all outputs, and squares are summed over the ranks `tp`.
    """

    def __init__(self, linear: nn.Module, update: DoraUpdate, tp: Group) -> None:
        super().__init__()
        self.m = nn.ParameterList(update.magnitudes())
        self.tp = tp if isinstance(linear, RowLinear) else None

    def forward(self, weight: Tensor, update: DoraUpdate) -> Tensor:
        """What each output is multiplied by, [outputs]: 1 for those that are not adapted."""
        parts, at = list[Tensor](), 0
        for span, m, norm in zip(update.spans, self.m, self.norms(weight, update), strict=True):
            parts += [m.new_ones(span.start - at), m / norm]
            at = span.stop
        return torch.cat([*parts, self.m[0].new_ones(update.outputs - at)])

    @torch.no_grad()
    def norms(self, weight: Tensor, update: DoraUpdate) -> list[Tensor]:
        """‖W + scale B A‖ of each row, module by module."""
        return self._norms(squares_of_rows(weight, update), update)

    @torch.no_grad()
    def first_values(self, weight: Tensor, update: DoraUpdate) -> dict[nn.Parameter, Tensor]:
        """What each parameter begins with: ‖W‖ of each row, as B is 0 then."""
        return dict(zip(self.m, self._norms(squares_of_rows(weight, update, adds=False), update), strict=True))

    def _norms(self, squares_S: Tensor, update: DoraUpdate) -> list[Tensor]:
        if self.tp is not None and self.tp.size > 1:
            squares_S = self.tp.all_reduce(squares_S)
        return list(torch.split(squares_S.sqrt(), [span.stop - span.start for span in update.spans]))
