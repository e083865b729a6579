"""The product of rounded rows and packed weights in plain steps of torch: the kernels' slow twin, with the same bits.

It stands in for the kernels where there are none, on any device that has float64. Its order of operations is that of
csrc/quantized_matmul.c.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tllm.kernels.packing import X_GROUP
from tllm.quantization.blocks import Blocks, Scheme, minima_of, scales_of, values_of
from tllm.quantization.packed_layout import PackedTensors, packed_group, padded_columns, unpack

HALF = 16

AT_ONCE = 2**22
"""Elements of a weight that are in float64 at once, or one output."""

GRID = 1.5 * 2**22
"""Numbers of this size in float64 are multiples of 2^-30."""


class RoundedRows(NamedTuple):
    """Rows of activations as whole numbers [rows, padded columns], and the scale of each group of 32 of a row."""

    codes: Tensor
    scales: Tensor


def round_rows(x_TD: Tensor) -> RoundedRows:
    """scale = largest / 127 of each group of 32, code = x * (127 / largest) to the nearest, ties to even.

    A group with a number that is not finite has the scale NaN, so that its products are NaN.
    """
    rows, columns = x_TD.shape
    x = torch.zeros(rows, padded_columns(columns), dtype=torch.float32, device=x_TD.device)
    x[:, :columns] = x_TD.float()
    groups = x.unflatten(1, (x.shape[1] // X_GROUP, X_GROUP))  # type: ignore[no-untyped-call]
    finite = groups.isfinite().all(-1)
    largest = torch.where(finite, groups.abs().amax(-1), 0.0)
    most = torch.full_like(largest, 127)  # a tensor: torch divides a number, or by one, by way of a rounded inverse
    inverse = torch.where(largest > 0, most / largest, 0.0)
    inverse = torch.where(inverse > 3.4e38, 0.0, inverse)
    codes = torch.where(finite[..., None], groups, 0.0) * inverse[..., None]
    scales = torch.where(inverse > 0, largest / most, 0.0)
    return RoundedRows(codes.round().flatten(1), torch.where(finite, scales, math.nan))


def reference_matmul(x_TD: Tensor, packed: PackedTensors, scheme: Scheme, outputs: int, exact: bool = False) -> Tensor:
    """x W^T in float32, [rows, outputs], every operation rounded once in the order of csrc/quantized_matmul.c.

    `exact`: in float64, as sums of multiples of 2^-30, to which the part of each of x's groups is rounded.
    """
    x, columns = round_rows(x_TD), x_TD.shape[1]
    y = torch.empty(len(x_TD), outputs, dtype=torch.float64 if exact else torch.float32, device=x_TD.device)
    at_once = max(1, AT_ONCE // x.codes.shape[1])
    for first in range(0, outputs, at_once):
        some = torch.arange(first, min(first + at_once, outputs), device=x_TD.device)
        weights = unpack(packed, scheme, some, x.codes.shape[1])
        y[:, first : first + len(some)] = _product(x, weights, columns, exact)
    return y


def _product(x: RoundedRows, weights: Blocks, columns: int, exact: bool) -> Tensor:
    """The product with all of these weights, whose padded columns are among them."""
    x_codes, x_scales = x
    scheme, values = weights.scheme, values_of(weights).double() - weights.scheme.offset
    width = packed_group(scheme, columns)
    scales, minima = scales_of(weights), minima_of(weights)
    zeros = torch.zeros(len(x_codes), len(values), device=x_codes.device)
    y = zeros.double() if exact else zeros
    step = HALF if width < X_GROUP else X_GROUP
    for group in range(-(-columns // width)):
        scaled, sums = zeros, zeros[:, :1]
        of_group = scales[:, group]
        for at in range(group * width, min((group + 1) * width, x_codes.shape[1]), step):
            some = x_codes[:, at : at + step].double()
            d = x_scales[:, at // X_GROUP, None]
            part = _group_sums(some, values[:, at : at + step], scheme) * d
            sum_of_x = some.sum(-1, keepdim=True).float() * d
            if exact:
                y = y + on_grid(part * of_group)
                y = y if minima is None else y - on_grid(minima[:, group] * sum_of_x)
            else:
                scaled, sums = scaled + part, sums + sum_of_x
        if not exact:
            y = y + scaled * of_group
            y = y if minima is None else y - minima[:, group] * sums
    return y


def _group_sums(x_TK: Tensor, values_FK: Tensor, scheme: Scheme) -> Tensor:
    """x W^T over the columns of a group, in float32: of whole numbers it is exact, else rounded column by column."""
    if scheme.code == "integer":
        return (x_TK @ values_FK.T).float()
    total = torch.zeros(len(x_TK), len(values_FK), device=x_TK.device)
    for x_T, values_F in zip(x_TK.unbind(1), values_FK.unbind(1), strict=True):
        total = total + (x_T[:, None] * values_F).float()
    return total


def on_grid(x: Tensor) -> Tensor:
    """In float64, to the nearest multiple of 2^-30: sums of such numbers are exact up to 2^23."""
    return (x.double() + GRID) - GRID
