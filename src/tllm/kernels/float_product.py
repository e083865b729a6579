"""x W^T for plain weights by the product that is fastest on this machine for this shape: measured, never assumed.

Which of torch's products reads a matrix fastest differs between processors by several times, in either direction
(docs/log/serving.md). So the first product of each kind (rows, shape, dtype, threads) times the candidates on the
weight itself, and the winner is kept (`kernels/autotune.py`). Candidates differ by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import Choice, fastest, next_power_of_two
from tllm.kernels.library import NUMBERS, library

MEASURED_ROWS = 64
"""For more rows than these a product is bound by arithmetic, and torch's own is taken."""

MEASURED_BYTES = 4 * 2**20
"""Smaller weights stay in a processor's own caches, where the choice is worth little: torch's own product is taken."""

Product = Callable[[Tensor, Tensor], Tensor]


class ProductKind(NamedTuple):
    """Products that are alike: `rows` is the largest number of rows that counts as the same."""

    rows: int
    outputs: int
    columns: int
    dtype: torch.dtype
    threads: int


choices = Autotuned[ProductKind]("product")


def float_matmul(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """x W^T without gradients, in x's dtype."""
    return CANDIDATES[product_name(x_TD, weight_FD)](x_TD, weight_FD)


def product_name(x_TD: Tensor, weight_FD: Tensor) -> str:
    """The candidate that is the fastest for these, measured if it is not known yet."""
    rows = len(x_TD)
    if rows > MEASURED_ROWS or rows == 0 or weight_FD.nbytes < MEASURED_BYTES or x_TD.dtype == torch.float64:
        return "linear"
    kind = ProductKind(
        next_power_of_two(rows), len(weight_FD), weight_FD.shape[1], weight_FD.dtype, torch.get_num_threads()
    )
    choice = choices.known.get(kind)
    if choice is None:
        choice = choices.choose(kind, names_for(rows), partial(measure, x_TD, weight_FD))
    return choice.name


def measure(x_TD: Tensor, weight_FD: Tensor) -> Choice:
    """Time every candidate that there is for these."""
    return fastest({name: partial(CANDIDATES[name], x_TD, weight_FD) for name in names_for(len(x_TD))})


def names_for(rows: int) -> list[str]:
    """The candidates that there are for so many rows."""
    return [name for name in CANDIDATES if _can(name, rows)]


def _can(name: str, rows: int) -> bool:
    if name == "torch.mv":
        return rows == 1
    return library() is not None if name == "kernel" else True


def _mv(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    return torch.mv(weight_FD, x_TD[0]).unsqueeze(0)


def _transposed(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    return torch.mm(weight_FD, x_TD.t()).t().contiguous()


def _kernel(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """The kernel of csrc/float_matmul.c: reads the weights once, in order, and sums in float32."""
    kernels = library()
    assert kernels is not None and weight_FD.is_contiguous()
    x_TD = x_TD.contiguous()
    (rows, columns), outputs = x_TD.shape, len(weight_FD)
    y_TF = torch.empty(rows, outputs, dtype=x_TD.dtype)
    scratch = torch.empty(rows * columns, dtype=torch.float32)
    number = NUMBERS[x_TD.dtype]
    kernels.float_matmul(
        weight_FD.data_ptr(),
        NUMBERS[weight_FD.dtype],
        outputs,
        columns,
        x_TD.data_ptr(),
        number,
        rows,
        y_TF.data_ptr(),
        number,
        scratch.data_ptr(),
        torch.get_num_threads(),
    )
    return y_TF


CANDIDATES: dict[str, Product] = {"linear": F.linear, "torch.mv": _mv, "W x^T": _transposed, "kernel": _kernel}
"""The products by the names that `tllm profile` shows."""
