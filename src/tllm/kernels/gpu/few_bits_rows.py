"""Rows of activations rounded to 8 bits on a GPU, as csrc/quantize_rows.c rounds them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tllm.kernels.packing import X_GROUP

ROUNDED_AT_ONCE = 32
"""Groups of a row that a program rounds."""


class DeviceRows(NamedTuple):
    """Rounded rows of x by groups of 32 columns, so that what a product reads of a group lies together.

    The codes are int8 [groups, rows, 32], the scales [groups, rows], and the sums of the codes of the first half of
    each group and of all of it int32 [groups, rows, 2].
    """

    codes: Tensor
    scales: Tensor
    sums: Tensor

    @property
    def groups(self) -> int:
        return len(self.scales)


def round_rows(x_TD: Tensor) -> DeviceRows:
    """Each group of 32 columns of a row by its own scale."""
    rows, columns = x_TD.shape
    groups, device = triton.cdiv(columns, X_GROUP), x_TD.device
    codes = torch.empty(groups, rows, X_GROUP, dtype=torch.int8, device=device)
    scales = torch.empty(groups, rows, dtype=torch.float32, device=device)
    sums = torch.empty(groups, rows, 2, dtype=torch.int32, device=device)
    if rows:
        grid = rows, triton.cdiv(groups, ROUNDED_AT_ONCE)
        _round_rows[grid](
            x_TD.contiguous(), codes, scales, sums, columns, groups, GROUPS=ROUNDED_AT_ONCE, enable_fp_fusion=False
        )
    return DeviceRows(codes, scales, sums)


@triton.jit
def _round_rows(x, codes, scales, sums, columns, groups, GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group, k = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, 32)
    is_group, at = group < groups, group[:, None] * 32 + k[None, :]
    into = group.to(tl.int64) * tl.num_programs(0) + row
    numbers = tl.load(x + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    # As whole numbers the bits of sizes have the same order, and what is not finite is above all.
    sizes = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.max(sizes, 1)
    is_finite = bits < 0x7F800000
    largest = tl.where(is_finite, bits, 0).to(tl.float32, bitcast=True)
    most = tl.full([GROUPS], 127.0, tl.float32)
    # A group too small to have an inverse counts as zeros: less than the first of these numbers, or a little more.
    is_large = largest > 3.7e-37
    inverse = tl.where(is_large, tl.div_rn(most, tl.where(is_large, largest, 1.0)), 0.0)
    inverse = tl.where(inverse > 3.4e38, 0.0, inverse)
    scale = tl.where(inverse > 0.0, tl.div_rn(largest, most), 0.0)
    tl.store(scales + into, tl.where(is_finite, scale, float("nan")), mask=is_group)
    # To the nearest whole number, ties to even, by the bits of a sum whose last one counts as 1.
    shifted = tl.where(is_finite[:, None], numbers, 0.0) * inverse[:, None] + 12582912.0
    nearest = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    tl.store(codes + into[:, None] * 32 + k[None, :], nearest.to(tl.int8), mask=is_group[:, None])
    tl.store(sums + into * 2, tl.sum(tl.where(k[None, :] < 16, nearest, 0), 1), mask=is_group)
    tl.store(sums + into * 2 + 1, tl.sum(nearest, 1), mask=is_group)


@triton.jit
def sum_of_codes(sums, of_row, is_known, half, HALVES: tl.constexpr):
    """Of groups of some rows, or of a half of them."""
    if HALVES:
        first = tl.load(sums + of_row * 2, mask=is_known, other=0)
        found = tl.where(half == 0, first, tl.load(sums + of_row * 2 + 1, mask=is_known, other=0) - first)
    else:
        found = tl.load(sums + of_row * 2 + 1, mask=is_known, other=0)
    return found
