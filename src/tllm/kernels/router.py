"""What chooses a token's experts: the router's product, and the softmax or sigmoid of its logits.

Another last bit of a score may choose another expert, and all that follows is another. So without gradients these are
kernels with sums in one order: the same bits on every processor and for any number of rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tllm.kernels.library import NUMBERS, Library
from tllm.kernels.row_operations import takes

SOFTMAX, SIGMOID = 0, 1
"""The kinds of scores, as in csrc/router.c."""

LINEAR = 20.0
"""Beyond it `softplus` is its argument."""


def router_matmul(kernels: Library, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """x W^T in float32: summed in float64, and rounded once."""
    x_TD, weight_ED = x_TD.contiguous(), weight_ED.contiguous()
    (outputs, columns), rows = weight_ED.shape, len(x_TD)
    y_TE = torch.empty(rows, outputs, dtype=torch.float32)
    kernels.experts.router_matmul(
        weight_ED.data_ptr(),
        NUMBERS[weight_ED.dtype],
        outputs,
        columns,
        x_TD.data_ptr(),
        NUMBERS[x_TD.dtype],
        rows,
        y_TE.data_ptr(),
        torch.get_num_threads(),
    )
    return y_TE


def softmax(x: Tensor) -> Tensor:
    """Of each row, in x's dtype: torch's with gradients and where there is no kernel."""
    return _scores(x, SOFTMAX)


def sigmoid(x: Tensor) -> Tensor:
    """Of each number, likewise."""
    return _scores(x, SIGMOID)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), likewise."""
    return F.silu(x) if takes(x) is None else x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) of each number, likewise: torch's own has other bits at the end of a tensor than inside it."""
    return F.softplus(x) if takes(x) is None else torch.where(x > LINEAR, x, x.clamp(max=LINEAR).exp().log1p())


def _scores(x: Tensor, kind: int) -> Tensor:
    kernels = takes(x)
    if kernels is None:
        return x.softmax(-1) if kind == SOFTMAX else x.sigmoid()
    wide = x.float().contiguous()
    y = torch.empty_like(wide)
    width = wide.shape[-1]
    kernels.experts.router_scores(wide.data_ptr(), wide.numel() // width, width, kind, y.data_ptr())
    return y.to(x.dtype)
