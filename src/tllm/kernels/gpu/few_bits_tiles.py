"""Products of many rows with weights of few bits on a GPU: whole numbers by tensor cores, and numbers of float8.

One program goes through all columns of its outputs, group by group, in the twin's order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tllm.kernels.gpu.few_bits_rows import DeviceRows, sum_of_codes
from tllm.kernels.gpu.few_bits_weight import UNSPECIALIZED, DeviceWeight, of_weight, on_grid
from tllm.kernels.library import LANES

TILE_ROWS = 16
"""The fewest rows that tensor cores multiply."""

STAGES = 3
"""Groups of columns that are on their way or computed at one time."""


class TileShape(NamedTuple):
    """The most rows of a program, which share what it reads of a weight; its blocks of 16 outputs; and its warps."""

    rows: int
    blocks: int
    warps: int


def multiply_by_tiles(
    x: DeviceRows,
    w: DeviceWeight,
    rows: tuple[int, int],
    y_NF: Tensor,
    at: int,
    shape: TileShape,
) -> None:
    """Write the product of rows [first, last) of x to these of y, from column `at` on."""
    first, last = rows
    tile = min(shape.rows, max(1 if w.is_float8 else TILE_ROWS, triton.next_power_of_2(last - first)))
    counts = w.counts(x.groups)
    _multiply[triton.cdiv(w.outputs, shape.blocks * LANES), triton.cdiv(last - first, tile)](
        *x,
        w.tensors["codes"] if w.is_float8 else w.tensors["codes"].view(torch.int32),
        *w.addresses(),
        y_NF,
        first,
        last,
        at,
        w.outputs,
        y_NF.shape[1],
        x.scales.shape[1],
        *counts,
        w.bias,
        w.offset - w.bias,
        **w.forms(),
        IS_FLOAT8=w.is_float8,
        HAS_REST=w.offset != w.bias,
        EXACT=y_NF.dtype == torch.float64,
        ONE=counts.per_group == 1,
        ROWS=tile,
        BLOCKS=shape.blocks,
        num_warps=shape.warps,
        num_stages=STAGES,
        enable_fp_fusion=False,
    )


@triton.jit
def _codes(words, is_output, table, bias, FOUR_BITS: tl.constexpr, BY_TABLE: tl.constexpr):
    """The codes of a group of 32 columns, or what the table has for them, less `bias`: int8 [outputs, 32]."""
    WORDS: tl.constexpr = 4 if FOUR_BITS else 8
    j, k = tl.arange(0, WORDS), tl.arange(0, 32 // WORDS)
    found = tl.load(words[:, None] + j[None, :] * 16, mask=is_output[:, None], other=0)
    found = (found[:, :, None] >> (k % 4 * 8 + k // 4 * 4)[None, None, :]) & (15 if FOUR_BITS else 255)
    if BY_TABLE:
        found = tl.load(table + found).to(tl.int32)
    return tl.reshape((found - bias).to(tl.int8), [words.shape[0], 32])


@triton.jit
def _float8_sums(x, here, is_row, is_output, ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """The sums of a group's columns, one after another: of e4m3 by exponent and mantissa of a float32 2^120 lower."""
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for k in range(32):
        byte = tl.load(here + k // 4 * 64 + k % 4, mask=is_output, other=0).to(tl.int32)
        w = (((byte & 0x7F) << 20) | ((byte >> 7) << 31)).to(tl.float32, bitcast=True) * 1.329227995784916e36
        some = tl.load(x + k, mask=is_row, other=0).to(tl.float32)
        sums += some[:, None] * w[None, :]
    return sums


@triton.jit
def _group_sums(
    x,
    of_x,
    codes,
    place,
    lane,
    is_row,
    is_output,
    table,
    bias,
    rest,
    half,
    FOUR_BITS: tl.constexpr,
    BY_TABLE: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    HAS_REST: tl.constexpr,
    HALVES: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """The sums of one group of 32 columns, or of a half of it, of weights without their scale by x's codes: float32."""
    if IS_FLOAT8:
        sums = _float8_sums(x, codes + place * 512 + lane * 4, is_row, is_output, ROWS, OUTPUTS)
    else:
        k = tl.arange(0, 32)[None, :]
        is_here = is_row[:, None]
        if HALVES:
            is_here = is_here & (k // 16 == half)
        w = _codes(codes + place * (64 if FOUR_BITS else 128) + lane, is_output, table, bias, FOUR_BITS, BY_TABLE)
        whole = tl.dot(tl.load(x[:, None] + k, mask=is_here, other=0), tl.trans(w), out_dtype=tl.int32)
        if HAS_REST:
            whole -= rest * of_x[:, None]
        sums = whole.to(tl.float32)
    return sums


@triton.jit
def _of_rows(
    x_scales,
    x_sums,
    x_group,
    half,
    x_groups,
    x_rows,
    t,
    is_row,
    HAS_SUMS: tl.constexpr,
    HALVES: tl.constexpr,
):
    """The scales of a group of some rows, and the sums of its codes, 0 where these are not asked for."""
    of_row, is_known = x_group * x_rows + t, is_row & (x_group < x_groups)
    d = tl.load(x_scales + of_row, mask=is_known, other=0.0)
    of_x = tl.zeros(t.shape, tl.int32)
    if HAS_SUMS:
        of_x = sum_of_codes(x_sums, of_row, is_known, half, HALVES)
    return d, of_x


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _multiply(
    x,
    x_scales,
    x_sums,
    codes,
    scales,
    super_scales,
    minima,
    super_minima,
    table,
    y,
    first,
    last,
    y_at,
    outputs,
    stride,
    x_rows,
    x_groups,
    groups,
    per_group,
    per_super,
    super_groups,
    bias,
    rest,
    FOUR_BITS: tl.constexpr,
    BY_TABLE: tl.constexpr,
    HAS_EXPONENTS: tl.constexpr,
    HAS_SUPER: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HAS_SUPER_MINIMA: tl.constexpr,
    HALVES: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    HAS_REST: tl.constexpr,
    EXACT: tl.constexpr,
    ONE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Some rows by some blocks of outputs. A group of the weight is `per_group` of x's groups, or half a one; `ONE`:
    there is one step for each."""
    OUTPUTS: tl.constexpr = BLOCKS * 16
    f = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    t = (first + tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_output, is_row = f < outputs, t < last
    block, lane = (f // 16).to(tl.int64), f % 16
    y_sums = tl.zeros([ROWS, OUTPUTS], tl.float64 if EXACT else tl.float32)
    scale, minimum = of_weight(
        *(scales, super_scales, minima, super_minima, block, lane, is_output, 0, groups, per_super, super_groups),
        *(HAS_SUPER, HAS_EXPONENTS, HAS_MINIMA, HAS_SUPER_MINIMA),
    )
    d, of_x = _of_rows(x_scales, x_sums, 0, 0, x_groups, x_rows, t, is_row, HAS_REST or HAS_MINIMA, HALVES)
    for number in range(groups):
        scale_now, minimum_now = scale, minimum
        scale, minimum = of_weight(  # of the next group, on its way meanwhile
            *(scales, super_scales, minima, super_minima, block, lane, is_output, number + 1, groups, per_super),
            *(super_groups, HAS_SUPER, HAS_EXPONENTS, HAS_MINIMA, HAS_SUPER_MINIMA),
        )
        scaled, sums_of_x = tl.zeros([ROWS, OUTPUTS], tl.float32), tl.zeros([ROWS], tl.float32)
        for step in range(per_group):
            # The last group of the weight may be short: what is read beyond x is 0.
            x_group = number // 2 if HALVES else number * per_group + step
            d_now, of_x_now, half = d, of_x, number % 2
            following = (number + 1) // 2 if HALVES else x_group + 1
            d, of_x = _of_rows(
                *(x_scales, x_sums, following, (number + 1) % 2, x_groups, x_rows, t, is_row),
                *(HAS_REST or HAS_MINIMA, HALVES),
            )
            of_row, is_here = x_group * x_rows + t, is_row & (x_group < x_groups)
            place, is_there = block * x_groups + x_group, is_output & (x_group < x_groups)
            part = _group_sums(
                *(x + of_row * 32, of_x_now, codes, place, lane, is_here, is_there, table, bias, rest, half),
                *(FOUR_BITS, BY_TABLE, IS_FLOAT8, HAS_REST, HALVES, ROWS, OUTPUTS),
            )
            part, sum_of_x = part * d_now[:, None], of_x_now.to(tl.float32) * d_now
            if EXACT:
                y_sums += on_grid(part * scale_now[None, :])
                if HAS_MINIMA:
                    y_sums -= on_grid(minimum_now[None, :] * sum_of_x[:, None])
            elif ONE:
                scaled, sums_of_x = part, sum_of_x
            else:
                scaled, sums_of_x = scaled + part, sums_of_x + sum_of_x
        if not EXACT:
            y_sums += scaled * scale_now[None, :]
            if HAS_MINIMA:
                y_sums -= minimum_now[None, :] * sums_of_x[:, None]
    into = y + t[:, None] * stride + y_at + f[None, :]
    tl.store(into, y_sums.to(y.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
