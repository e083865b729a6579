"""Products with weights of few bits on a GPU, with the bits of the processors' kernels.

x is rounded to 8 bits by groups of 32 first. Tensor cores add up codes by x's codes as whole numbers; scales are
applied in the order of csrc/quantized_matmul.c, each operation rounded once: nothing is fused (`enable_fp_fusion`), and
one program adds up all columns of an output. The weights lie as those of a processor (`quantization/packed_layout.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tllm.kernels.packing import LANES, X_GROUP

TILE_ROWS = 16
"""The fewest rows that tensor cores multiply."""

MOST_ROWS = 64
"""Rows that share what is read of a weight."""

ROUNDED_AT_ONCE = 32
"""Groups of a row that a program rounds."""


class DeviceRows(NamedTuple):
    """Rounded rows of x: codes int8 [rows, padded columns], and of each group of 32 the scale, [rows, groups], and the
    sums of the codes of each half, int32 [rows, groups, 2]."""

    codes: Tensor
    scales: Tensor
    sums: Tensor


class DeviceWeight(NamedTuple):
    """Packed outputs of one scheme: the `tensors` of a packed weight by their names; columns that share a scale, and a
    super scale; what is taken from each code's value; the `table` of 4-bit codes, uint8; whether codes are numbers of
    float8, and scales powers of two."""

    tensors: dict[str, Tensor]
    outputs: int
    bits: int
    group: int
    super_group: int
    offset: int
    table: Tensor | None
    is_float8: bool
    has_exponents: bool


def round_rows(x_TD: Tensor) -> DeviceRows:
    """As csrc/quantize_rows.c does it."""
    rows, columns = x_TD.shape
    groups, device = triton.cdiv(columns, X_GROUP), x_TD.device
    codes = torch.empty(rows, groups * X_GROUP, dtype=torch.int8, device=device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=device)
    sums = torch.empty(rows, groups, 2, dtype=torch.int32, device=device)
    if rows:
        grid = rows, triton.cdiv(groups, ROUNDED_AT_ONCE)
        _round_rows[grid](
            x_TD.contiguous(), codes, scales, sums, columns, groups, GROUPS=ROUNDED_AT_ONCE, enable_fp_fusion=False
        )
    return DeviceRows(codes, scales, sums)


def multiply(x: DeviceRows, w: DeviceWeight, first: int, last: int, y_NF: Tensor, at: int) -> None:
    """Write the product of rows [first, last) of x to these of y, from column `at` on.

    In float64, if y is, as sums of multiples of 2^-30.
    """
    rows, tensors = last - first, w.tensors
    if rows == 0 or w.outputs == 0:
        return
    least = 1 if w.is_float8 else TILE_ROWS
    tile = min(MOST_ROWS, max(least, triton.next_power_of_2(rows)))
    blocks = 1 if rows <= TILE_ROWS else 4
    codes, scales, halves = tensors["codes"], tensors["scales"], w.group < X_GROUP
    forms: dict[str, bool] = dict(
        FOUR_BITS=w.bits == 4,
        BY_TABLE=w.table is not None,
        IS_FLOAT8=w.is_float8,
        HAS_EXPONENTS=w.has_exponents,
        HAS_SUPER="super_scales" in tensors,
        HAS_MINIMA="minima" in tensors,
        HAS_SUPER_MINIMA="super_minima" in tensors,
        EXACT=y_NF.dtype == torch.float64,
        HALVES=halves,
    )
    _multiply[triton.cdiv(w.outputs, blocks * LANES), triton.cdiv(rows, tile)](
        *x,
        codes,
        scales,
        *(tensors.get(name, codes) for name in ("super_scales", "minima", "super_minima")),  # never read, if not there
        codes if w.table is None else w.table,
        y_NF,
        first,
        last,
        at,
        w.outputs,
        y_NF.shape[1],
        x.scales.shape[1],
        scales.shape[1],
        1 if halves else min(triton.cdiv(w.group, X_GROUP), x.scales.shape[1]),
        w.super_group // w.group if w.super_group else 1,
        tensors.get("super_scales", scales).shape[1],
        w.offset,
        ROWS=tile,
        BLOCKS=blocks,
        **forms,
        num_warps=1 if blocks == 1 else 4,
        enable_fp_fusion=False,
    )


@triton.jit
def _round_rows(x, codes, scales, sums, columns, groups, GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group, k = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, 32)
    is_group, at = group < groups, group[:, None] * 32 + k[None, :]
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
    tl.store(scales + row * groups + group, tl.where(is_finite, scale, float("nan")), mask=is_group)
    # To the nearest whole number, ties to even, by the bits of a sum whose last one counts as 1.
    shifted = tl.where(is_finite[:, None], numbers, 0.0) * inverse[:, None] + 12582912.0
    nearest = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    tl.store(codes + row * groups * 32 + at, nearest.to(tl.int8), mask=is_group[:, None])
    halves = sums + (row * groups + group) * 2
    tl.store(halves, tl.sum(tl.where(k[None, :] < 16, nearest, 0), 1), mask=is_group)
    tl.store(halves + 1, tl.sum(tl.where(k[None, :] < 16, 0, nearest), 1), mask=is_group)


@triton.jit
def _of_group(codes, super_codes, at, super_at, mask, HAS_SUPER: tl.constexpr, HAS_EXPONENTS: tl.constexpr):
    """The scales or minima of a group for some outputs, float32."""
    found = tl.load(codes + at, mask=mask, other=0)
    if HAS_EXPONENTS:
        exponents = found.to(tl.int32)
        small = tl.full(exponents.shape, 0x200000, tl.int32) << tl.minimum(exponents, 1)
        wide = tl.where(exponents < 2, small, (exponents - 1) << 23).to(tl.float32, bitcast=True)
    else:
        wide = found.to(tl.float32)
        if HAS_SUPER:
            wide = tl.load(super_codes + super_at, mask=mask, other=0.0).to(tl.float32) * wide
    return wide


@triton.jit
def _codes(here, is_output, table, FOUR_BITS: tl.constexpr, BY_TABLE: tl.constexpr):
    """The codes of a group of 32 columns, or what the table has for them, as int8: less 128, but for plain 4 bits."""
    k = tl.arange(0, 32)[:, None]
    place = (k // 8 if FOUR_BITS else k // 4) * 64 + k % 4
    found = tl.load(here[None, :] + place, mask=is_output[None, :], other=0).to(tl.int32)
    if FOUR_BITS:
        found = (found >> (k // 4 % 2) * 4) & 15
    if BY_TABLE:
        found = tl.load(table + found).to(tl.int32)
    if BY_TABLE or not FOUR_BITS:
        found = found - 128
    return found.to(tl.int8)


@triton.jit
def _integer_sums(x, w, is_row, sum_of_codes, rest, half, STEPS: tl.constexpr):
    """The sums of a group, or of a half of it, of codes by x's codes, less `rest` times x's: exact."""
    k = tl.arange(0, 32)[None, :]
    is_here = is_row[:, None] & (k // (32 // STEPS) == half)
    sums = tl.dot(tl.load(x[:, None] + k, mask=is_here, other=0), w, out_dtype=tl.int32)
    return (sums - rest * sum_of_codes[:, None]).to(tl.float32)


@triton.jit
def _float8_sums(x, here, is_row, is_output, ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """The sums of a group's columns, one after another: of e4m3 by exponent and mantissa of a float32 2^120 lower."""
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for k in range(32):
        byte = tl.load(here + (k // 4) * 64 + k % 4, mask=is_output, other=0).to(tl.int32)
        w = (((byte & 0x7F) << 20) | ((byte >> 7) << 31)).to(tl.float32, bitcast=True) * 1.329227995784916e36
        some = tl.load(x + k, mask=is_row, other=0).to(tl.float32)
        sums += some[:, None] * w[None, :]
    return sums


@triton.jit
def _on_grid(x):
    """In float64, to the nearest multiple of 2^-30."""
    return (x.to(tl.float64) + 6291456.0) - 6291456.0


@triton.jit(do_not_specialize=["first", "last", "y_at"])  # which differ for each expert and batch
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
    x_groups,
    groups,
    per_group,
    per_super,
    super_groups,
    offset,
    FOUR_BITS: tl.constexpr,
    BY_TABLE: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    HAS_EXPONENTS: tl.constexpr,
    HAS_SUPER: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HAS_SUPER_MINIMA: tl.constexpr,
    EXACT: tl.constexpr,
    HALVES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Some rows by some blocks of outputs. A group of the weight is `per_group` of x's groups, or half a one."""
    OUTPUTS: tl.constexpr = BLOCKS * 16
    STEPS: tl.constexpr = 2 if HALVES else 1
    f = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    t = (first + tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_output, is_row = f < outputs, t < last
    block, lane = (f // 16).to(tl.int64), f % 16
    y_sums = tl.zeros([ROWS, OUTPUTS], tl.float64 if EXACT else tl.float32)
    scaled, sums_of_x = tl.zeros([ROWS, OUTPUTS], tl.float32), tl.zeros([ROWS], tl.float32)
    for x_group in range(x_groups):
        here = codes + (block * x_groups + x_group) * (256 if FOUR_BITS else 512) + lane * 4
        of_row = t * x_groups + x_group
        d = tl.load(x_scales + of_row, mask=is_row, other=0.0)
        if not IS_FLOAT8:
            w = _codes(here, is_output, table, FOUR_BITS, BY_TABLE)
        for half in tl.static_range(STEPS):
            sum_of_codes = tl.load(x_sums + of_row * 2 + half, mask=is_row, other=0)
            if not HALVES:
                sum_of_codes += tl.load(x_sums + of_row * 2 + 1, mask=is_row, other=0)
            if IS_FLOAT8:
                part = _float8_sums(x + of_row * 32, here, is_row, is_output, ROWS, OUTPUTS)
            else:
                rest = offset if FOUR_BITS and not BY_TABLE else offset - 128
                part = _integer_sums(x + of_row * 32, w, is_row, sum_of_codes, rest, half, STEPS)
            part, sum_of_x = part * d[:, None], sum_of_codes.to(tl.float32) * d
            number = x_group * STEPS + half if HALVES else x_group // per_group
            # The last group of 32 may have a half that is none of the weight's: x is 0 there.
            at, is_known = (block * groups + number) * 16 + lane, is_output & (lane * 0 + number < groups)
            super_at = (block * super_groups + number // per_super) * 16 + lane
            scale = _of_group(scales, super_scales, at, super_at, is_known, HAS_SUPER, HAS_EXPONENTS)[None, :]
            if HAS_MINIMA:
                minimum = _of_group(minima, super_minima, at, super_at, is_known, HAS_SUPER_MINIMA, False)[None, :]
            if EXACT:
                y_sums += _on_grid(part * scale)
                if HAS_MINIMA:
                    y_sums -= _on_grid(minimum * sum_of_x[:, None])
            else:
                scaled, sums_of_x = scaled + part, sums_of_x + sum_of_x
                is_end = ((x_group + 1) % per_group == 0) | (x_group == x_groups - 1)
                y_sums = tl.where(is_end, y_sums + scaled * scale, y_sums)
                if HAS_MINIMA:
                    y_sums = tl.where(is_end, y_sums - minimum * sums_of_x[:, None], y_sums)
                scaled, sums_of_x = tl.where(is_end, 0.0, scaled), tl.where(is_end, 0.0, sums_of_x)
    into = y + t[:, None] * stride + y_at + f[None, :]
    tl.store(into, y_sums.to(y.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
