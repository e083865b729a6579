"""x W^T for few rows of x on a GPU, in Triton: reads W once, in order, at the rate of the memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 64
"""For more rows a product is bound by arithmetic."""

LEAST_ROWS = 16
"""Rows of the smallest matrix product; fewer are filled up with zeros, which cost nothing beside reading W."""


def skinny_matmul(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """x W^T in x's dtype, summed in float32."""
    x_TD = x_TD.contiguous()
    (rows, columns), outputs = x_TD.shape, len(weight_FD)
    y_TF = torch.empty(rows, outputs, dtype=x_TD.dtype, device=x_TD.device)
    if rows == 1:
        block = 8 if outputs < 16384 else 16
        _one_row[(triton.cdiv(outputs, block),)](
            x_TD, weight_FD, y_TF, outputs, columns, weight_FD.stride(0), OUTPUTS=block, COLUMNS=512, num_warps=4
        )
        return y_TF
    block = 16 if outputs < 16384 else 32
    _some_rows[(triton.cdiv(outputs, block),)](
        x_TD,
        weight_FD,
        y_TF,
        rows,
        outputs,
        columns,
        weight_FD.stride(0),
        ROWS=max(LEAST_ROWS, triton.next_power_of_2(rows)),
        OUTPUTS=block,
        COLUMNS=256 if rows <= LEAST_ROWS else 128,
        num_warps=4,
        num_stages=4,
    )
    return y_TF


@triton.jit
def _one_row(x, weight, y, outputs, columns, stride, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr):
    f = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    d = tl.arange(0, COLUMNS)
    sums = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    row = weight + f.to(tl.int64)[:, None] * stride
    for at in range(0, columns, COLUMNS):
        is_here = at + d < columns
        w = tl.load(row + (at + d)[None, :], mask=(f < outputs)[:, None] & is_here[None, :], other=0.0)
        sums += w.to(tl.float32) * tl.load(x + at + d, mask=is_here, other=0.0).to(tl.float32)[None, :]
    tl.store(y + f, tl.sum(sums, 1).to(y.dtype.element_ty), mask=f < outputs)


@triton.jit
def _some_rows(
    x, weight, y, rows, outputs, columns, stride, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr
):
    f = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    d, t = tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    row = weight + f.to(tl.int64)[:, None] * stride
    for at in range(0, columns, COLUMNS):
        is_here = at + d < columns
        w = tl.load(row + (at + d)[None, :], mask=(f < outputs)[:, None] & is_here[None, :], other=0.0)
        x_at = t[:, None] * columns + (at + d)[None, :]
        x_part = tl.load(x + x_at, mask=(t < rows)[:, None] & is_here[None, :], other=0.0)
        sums += tl.dot(x_part, tl.trans(w), input_precision="ieee")
    y_at = t[:, None] * outputs + f[None, :]
    tl.store(y + y_at, sums.to(y.dtype.element_ty), mask=(t < rows)[:, None] & (f < outputs)[None, :])
