"""Products of a few rows with weights of few bits on a GPU, bound by the memory: four codes by four of x at a time.

A program makes 16 outputs of some rows. All its threads make the whole-number sums of many groups of columns, while the
words of the next groups are on their way. Then the groups are added up in their order, which is the twin's: by way of
memory, since the sums of an output's groups lie with different threads.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tllm.kernels.gpu.few_bits_rows import DeviceRows, sum_of_codes
from tllm.kernels.gpu.few_bits_weight import UNSPECIALIZED, DeviceWeight, of_weight, on_grid
from tllm.kernels.library import LANES

MOST_ROWS = 8
"""Rows of one program."""

MOST_ROOM = 2**23
"""Numbers that programs put down at a time, 4 bytes each: of a wide weight some blocks are computed after others."""


def multiply_by_words(
    x: DeviceRows,
    w: DeviceWeight,
    rows: tuple[int, int],
    y_NF: Tensor,
    at: int,
    groups: int,
    warps: int,
) -> None:
    """Write the product of rows [first, last) of x to these of y, from column `at` on.

    The words of so many `groups` of 32 columns are read at once, by so many `warps`.
    """
    (first, last), exact = rows, y_NF.dtype == torch.float64
    blocks, tile = triton.cdiv(w.outputs, LANES), min(MOST_ROWS, triton.next_power_of_2(last - first))
    tiles, forms = triton.cdiv(last - first, tile), w.forms()
    counts = w.counts(x.groups)
    groups = min(groups, triton.next_power_of_2(x.groups))
    one = counts.per_group == 1
    rest = w.offset - (0 if w.bits == 4 and w.table is None else w.bias)
    terms = 2 if one and forms["HAS_MINIMA"] else 1
    room = 0 if exact else 2 * terms * tiles * tile * groups * (2 if w.halves else 1) * LANES  # of a block
    at_once = min(blocks, max(1, MOST_ROOM // room)) if room else blocks
    scratch = torch.empty(at_once * room, dtype=torch.float32, device=y_NF.device)
    for first_block in range(0, blocks, at_once):
        _multiply[min(at_once, blocks - first_block), tiles](
            x.codes.view(torch.int32),
            x.scales,
            x.sums,
            w.tensors["codes"].view(torch.int32),
            *w.addresses(),
            scratch,
            y_NF,
            first,
            last,
            at,
            first_block,
            w.outputs,
            y_NF.shape[1],
            x.scales.shape[1],
            *counts,
            w.bias,
            rest,
            **forms,
            EXACT=exact,
            ONE=one,
            HAS_REST=rest != 0,
            HAS_DP4A=has_dp4a(y_NF.device.type),
            ROWS=tile,
            GROUPS=groups,
            num_warps=warps,
            num_stages=1,
            enable_fp_fusion=False,
        )


@functools.cache
def has_dp4a(kind: str) -> bool:
    """Whether one instruction that we can name adds four products of bytes: NVIDIA's devices have it."""
    return kind == "cuda" and torch.version.hip is None


@triton.jit
def _dot4(a, b, sums, HAS_DP4A: tl.constexpr):
    """`sums`, and the products of the four signed bytes of a by those of b."""
    if HAS_DP4A:
        sums = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, sums], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for byte in tl.static_range(4):
            sums += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
    return sums


@triton.jit
def _words(here, group, WORDS: tl.constexpr):
    """The words of some groups for each output, a tensor for each of the four or eight places in a group."""
    here += group[:, None] * (WORDS * 16)
    found = (tl.load(here),)
    for j in tl.static_range(1, WORDS):
        # Triton reads no starred expressions.
        found = found + (tl.load(here + j * 16),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _by_table(codes, table, bias):
    """Words of four signed bytes, what the table has less `bias`, for words of four codes of 4 bits."""
    words = tl.zeros_like(codes)
    for byte in tl.static_range(4):
        found = tl.load(table + ((codes >> (8 * byte)) & 15)).to(tl.int32) - bias
        words |= (found & 0xFF) << (8 * byte)
    return words


@triton.jit
def _whole_sums(
    codes,
    numbers,
    table,
    bias,
    half: tl.constexpr,
    STEPS: tl.constexpr,
    GROUPS: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    BY_TABLE: tl.constexpr,
    HAS_DP4A: tl.constexpr,
):
    """The sums of products of some groups, or of a half of each, with a row's codes, whose words are at `numbers`."""
    WORDS: tl.constexpr = 4 if FOUR_BITS else 8
    sums = tl.zeros([GROUPS, 16], tl.int32)
    for j in tl.static_range(WORDS // STEPS):
        some = codes[half * (WORDS // STEPS) + j]
        here = numbers + (half * (WORDS // STEPS) + j) * (8 // WORDS)
        if FOUR_BITS:
            low, high = some & 0x0F0F0F0F, (some >> 4) & 0x0F0F0F0F
            if BY_TABLE:
                low, high = _by_table(low, table, bias), _by_table(high, table, bias)
            sums = _dot4(low, tl.load(here)[:, None], sums, HAS_DP4A)
            sums = _dot4(high, tl.load(here + 1)[:, None], sums, HAS_DP4A)
        else:  # with 128 less in each byte
            sums = _dot4(some ^ -2139062144, tl.load(here)[:, None], sums, HAS_DP4A)
    return sums


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _multiply(
    x,
    x_scales,
    x_sums,
    words,
    scales,
    super_scales,
    minima,
    super_minima,
    table,
    scratch,
    y,
    first,
    last,
    y_at,
    first_block,
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
    EXACT: tl.constexpr,
    ONE: tl.constexpr,
    HAS_REST: tl.constexpr,
    HAS_DP4A: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """A block of 16 outputs of some rows. `ONE`: each group of x, or each half of it, is a group of the weight."""
    STEPS: tl.constexpr = 2 if HALVES else 1
    WORDS: tl.constexpr = 4 if FOUR_BITS else 8
    TERMS: tl.constexpr = 2 if ONE and HAS_MINIMA else 1
    ROOM: tl.constexpr = ROWS * GROUPS * STEPS * 16
    block, tile = (first_block + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    lane, g, row = tl.arange(0, 16), tl.arange(0, GROUPS), tl.arange(0, ROWS)
    is_output, t_first = block * 16 + lane < outputs, (first + tile * ROWS).to(tl.int64)
    here = words + block * x_groups * (WORDS * 16) + lane[None, :]
    room = scratch + (tl.program_id(0) * tl.num_programs(1) + tile) * (2 * TERMS * ROOM)
    t = t_first + row
    is_row = t < last
    y_sums = tl.zeros([ROWS, 16], tl.float64 if EXACT else tl.float32)
    scaled, sums_of_x = tl.zeros([ROWS, 16], tl.float32), tl.zeros([ROWS], tl.float32)
    ahead = _words(here, tl.minimum(g, x_groups - 1), WORDS)
    for at in range(0, x_groups, GROUPS):
        group = at + g
        is_group = group < x_groups
        codes = ahead
        ahead = _words(here, tl.minimum(group + GROUPS, x_groups - 1), WORDS)
        into = room + (at // GROUPS % 2) * (TERMS * ROOM)
        for half in tl.static_range(STEPS):
            if ONE or EXACT:
                scale, minimum = of_weight(
                    *(scales, super_scales, minima, super_minima, block, lane[None, :], is_output[None, :]),
                    *(((group * STEPS + half) // per_group)[:, None], groups, per_super, super_groups),
                    *(HAS_SUPER, HAS_EXPONENTS, HAS_MINIMA, HAS_SUPER_MINIMA),
                )
            for r in tl.static_range(ROWS):
                of_row = tl.minimum(group, x_groups - 1).to(tl.int64) * x_rows + tl.minimum(t_first + r, last - 1)
                sums = _whole_sums(
                    *(codes, x + of_row * 8, table, bias, half, STEPS, GROUPS, FOUR_BITS, BY_TABLE, HAS_DP4A)
                )
                if HAS_REST or HAS_MINIMA:
                    of_x = sum_of_codes(x_sums, of_row, is_group, half, HALVES)
                if HAS_REST:
                    sums -= rest * of_x[:, None]
                d = tl.load(x_scales + of_row, mask=is_group, other=0.0)
                part = sums.to(tl.float32) * d[:, None]
                if ONE or EXACT:
                    part = part * scale
                    if HAS_MINIMA:
                        taken = minimum * (of_x.to(tl.float32) * d)[:, None]
                if EXACT:
                    of_chunk = tl.sum(on_grid(part), 0)
                    if HAS_MINIMA:
                        of_chunk -= tl.sum(on_grid(taken), 0)
                    y_sums += tl.where((row == r)[:, None], of_chunk[None, :], 0.0)
                else:
                    term = into + ((r * GROUPS + g) * STEPS + half)[:, None] * 16 + lane[None, :]
                    tl.store(term, part)
                    if TERMS == 2:
                        tl.store(term + ROOM, taken)
        if not EXACT:
            tl.debug_barrier()
            terms = into + (row * GROUPS * STEPS)[:, None] * 16 + lane[None, :]
            for step in range(GROUPS * STEPS):
                found = tl.load(terms + step * 16)
                if ONE:
                    y_sums += found
                    if HAS_MINIMA:
                        y_sums -= tl.load(terms + ROOM + step * 16)
                else:
                    x_group = at + step
                    end_scale, end_minimum = of_weight(
                        *(scales, super_scales, minima, super_minima, block, lane, is_output, x_group // per_group),
                        *(groups, per_super, super_groups, HAS_SUPER, HAS_EXPONENTS, HAS_MINIMA, HAS_SUPER_MINIMA),
                    )
                    is_end = ((x_group + 1) % per_group == 0) | (x_group == x_groups - 1)
                    scaled += found
                    y_sums = tl.where(is_end, y_sums + scaled * end_scale[None, :], y_sums)
                    scaled = tl.where(is_end, 0.0, scaled)
                    if HAS_MINIMA:
                        of_rows, is_read = x_group * x_rows + t, is_row & (x_group < x_groups)
                        of_group = sum_of_codes(x_sums, of_rows, is_read, 0, False)
                        sums_of_x += of_group.to(tl.float32) * tl.load(x_scales + of_rows, mask=is_read, other=0.0)
                        y_sums = tl.where(is_end, y_sums - end_minimum[None, :] * sums_of_x[:, None], y_sums)
                        sums_of_x = tl.where(is_end, 0.0, sums_of_x)
    into = y + t[:, None] * stride + (y_at + block * 16 + lane)[None, :]
    tl.store(into, y_sums.to(y.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
