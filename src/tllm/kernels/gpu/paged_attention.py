"""Attention over the paged cache on a GPU: tiles of tokens over the pages of their sequences, in Triton.

A program computes one tile, tokens of one sequence, for the query heads that share a kv head. It goes over the keys by
blocks with a running softmax (FlashAttention, 2205.14135). Where few tokens meet many keys, as in replies, the keys of
a tile are divided among several programs, and a second kernel puts their parts together (Flash-Decoding).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tllm.kernels.fastest import next_power_of_two
from tllm.kernels.gpu.row_operations import tanh
from tllm.kernels.paged_attention import most_shared

MOST_WIDTH = 256
"""The widest heads: a block of their keys and values lies in the memory that the threads of a program share."""

TILE_ROWS = 64
"""Rows of a tile of a prompt: its tokens times the query heads of a kv head."""

LEAST_ROWS = LEAST_WIDTH = 16
"""Of the smallest matrix product: rows, and what is summed over."""

KEYS = 64
"""Keys of a block."""

PROGRAMS = 256
"""Keys are divided until there are about so many programs, two for each multiprocessor of a large GPU."""

MOST_PARTS = 16
"""More take longer to put together than they save."""

NO_CODES, INT8, FP8, FP8_BITS = 0, 1, 2, 3
"""What keys and values are held as. `FP8_BITS`: e4m3 on a device that has no such numbers, put together from bits."""

FP8_CAPABILITY = (8, 9)
"""Of the first of NVIDIA's GPUs for which Triton has e4m3, Ada's."""


class TokenTiles(NamedTuple):
    """Tiles of tokens, and the pages of their sequences, on the device.

    `tiles`, int32 [tiles, 4]: each one's first row, its number of rows, the position of the first, and its sequence.
    `tables`, int32 [sequences, pages]: the pages of each sequence. `tokens`: the most rows of a tile.
    """

    tiles: Tensor
    tables: Tensor
    tokens: int


class LayerSlots(NamedTuple):
    """A layer's keys and values, [K, slots, H], and where they are codes their scales, [K, slots, 1]."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def codes(self) -> int:
        """What the keys and values are held as."""
        if self.key_scales is None:
            return NO_CODES
        if self.keys.dtype != torch.uint8:
            return INT8
        return FP8 if has_fp8(self.keys.device) else FP8_BITS


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Whether Triton has e4m3 for this device, as far as is known."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def fits(width: int, dtype: torch.dtype) -> bool:
    """Whether the kernel has room for heads of this width, and computes in this dtype."""
    return width <= MOST_WIDTH and dtype in (torch.float32, torch.bfloat16, torch.float16)


def tokens_of_tile(first_heads: Sequence[int]) -> int:
    """How many tokens a tile of a prompt has at the most."""
    return max(1, TILE_ROWS // most_shared(first_heads))


def parts_of(tiles: int, kv_heads: int, most_keys: int) -> int:
    """Among how many programs the keys of a tile are divided, where so many tiles see at most so many keys."""
    wanted = next_power_of_two(PROGRAMS // max(1, tiles * kv_heads))
    return max(1, min(wanted, MOST_PARTS, most_keys // (2 * KEYS)))


class GpuAttention:
    """One kind of attention. A token sees the last `window` keys up to its own (None: all of them).

    `first_heads` are the first query head of each kv head, and the number of heads at the end.
    """

    def __init__(
        self,
        first_heads: Sequence[int],
        scale: float,
        softcap: float | None,
        window: int | None,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._kv_heads, self._heads, self._shared = len(first_heads) - 1, first_heads[-1], most_shared(first_heads)
        self._first_heads = _on_device(tuple(first_heads), device)
        self._scale, self._softcap, self._window, self._page_size = scale, softcap or 0.0, window or 0, page_size

    def __call__(
        self,
        tiles: TokenTiles,
        q_TNH: Tensor,
        slots: LayerSlots,
        sinks_N: Tensor | None,
        parts: int,
        out_TNH: Tensor,
    ) -> None:
        """Write out [T, N, H] for q [T, N, H], every row of which is in a tile, with the keys of each in `parts`.

        `sinks_N`: a score of each head that joins its softmax and has no value.
        """
        tokens, heads, width = q_TNH.shape
        assert q_TNH.stride()[1:] == (width, 1) and out_TNH.is_contiguous()
        sums = made = out_TNH
        if parts > 1:
            made = torch.empty(tokens * heads, parts, width, dtype=torch.float32, device=q_TNH.device)
            sums = torch.empty(tokens * heads, parts, dtype=torch.float32, device=q_TNH.device)
        padded, sinks = max(LEAST_WIDTH, triton.next_power_of_2(width)), q_TNH if sinks_N is None else sinks_N
        _attend[(len(tiles.tiles), self._kv_heads, parts)](
            q_TNH,
            slots.keys,
            slots.values,
            slots.keys if slots.key_scales is None else slots.key_scales,
            slots.values if slots.value_scales is None else slots.value_scales,
            sinks,
            tiles.tiles,
            tiles.tables,
            self._first_heads,
            made,
            sums,
            self._scale,
            self._softcap,
            q_TNH.stride(0),
            slots.keys.shape[1],
            tiles.tables.stride(0),
            parts,
            HEADS=heads,
            SHARED=self._shared,
            WIDTH=width,
            PADDED=padded,
            ROWS=max(LEAST_ROWS, triton.next_power_of_2(tiles.tokens * self._shared)),
            KEYS=KEYS,
            PAGE=self._page_size,
            WINDOW=self._window,
            CAPS=self._softcap != 0.0,
            SINKS=sinks_N is not None,
            CODES=slots.codes,
            DIVIDES=parts > 1,
        )
        if parts > 1:
            _join[(tokens * heads,)](
                made,
                sums,
                sinks,
                out_TNH,
                parts,
                HEADS=heads,
                WIDTH=width,
                PADDED=padded,
                PARTS=triton.next_power_of_2(parts),
                SINKS=sinks_N is not None,
            )


@functools.cache
@torch.inference_mode(False)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Copied once: while a graph is recorded nothing comes from the host."""
    return torch.tensor(numbers, dtype=torch.int32).to(device)


@triton.jit
def _numbers(pointers, scales, mask, CODES: tl.constexpr, dtype: tl.constexpr):
    """Keys or values: as they are, or what their codes stand for, in the queries' dtype."""
    found = tl.load(pointers, mask=mask, other=0)
    if CODES == 2:
        found = found.to(tl.float8e4nv, bitcast=True)
    if CODES == 3:
        # Sign, exponent and fraction at their places in float16, whose exponent's bias is larger by 8.
        bits = found.to(tl.int16)
        bits = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16)
        found = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    if CODES != 0:
        found = (found.to(tl.float32) * scales).to(dtype)
    return found


@triton.jit
def _attend(
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    tiles,
    tables,
    first_heads,
    made,
    sums,
    scale,
    softcap,
    query_stride,
    slots,
    table_stride,
    parts,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPS: tl.constexpr,
    SINKS: tl.constexpr,
    CODES: tl.constexpr,
    DIVIDES: tl.constexpr,
):
    """One part of the keys of a tile, for one kv head. Row r is token r // SHARED and query head r % SHARED of it."""
    tile, kv, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(tiles + 4 * tile).to(tl.int64)
    tokens = tl.load(tiles + 4 * tile + 1)
    start = tl.load(tiles + 4 * tile + 2)
    table = tables + tl.load(tiles + 4 * tile + 3).to(tl.int64) * table_stride
    first_head = tl.load(first_heads + kv)
    r, d = tl.arange(0, ROWS), tl.arange(0, PADDED)
    token, head = r // SHARED, first_head + r % SHARED
    is_row = (token < tokens) & (head < tl.load(first_heads + kv + 1))
    q_at = (first_row + token)[:, None] * query_stride + head[:, None] * WIDTH + d[None, :]
    q = tl.load(queries + q_at, mask=is_row[:, None] & (d < WIDTH)[None, :], other=0)

    stop, first_key = start + tokens, 0
    if WINDOW > 0:
        first_key = tl.maximum(0, start - WINDOW + 1)
    blocks = tl.cdiv(stop - first_key, KEYS)
    mine = tl.cdiv(blocks, parts) * KEYS
    low = first_key + part * mine
    high = tl.minimum(low + mine, stop)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, PADDED], tl.float32)
    base = kv.to(tl.int64) * slots
    for at in range(low, high, KEYS):
        p = at + tl.arange(0, KEYS)
        is_key = p < high
        page = tl.load(table + p // PAGE, mask=is_key, other=0).to(tl.int64)
        slot = base + page * PAGE + p % PAGE
        mask = is_key[:, None] & (d < WIDTH)[None, :]
        place = slot[:, None] * WIDTH + d[None, :]
        k_scale, v_scale = 1.0, 1.0
        if CODES != 0:
            k_scale = tl.load(key_scales + slot, mask=is_key, other=0.0)[:, None]
            v_scale = tl.load(value_scales + slot, mask=is_key, other=0.0)[:, None]
        k = _numbers(keys + place, k_scale, mask, CODES, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPS:
            scores = softcap * tanh(scores / softcap)
        ahead = (start + token)[:, None] - p[None, :]
        sees = is_key[None, :] & (ahead >= 0)
        if WINDOW > 0:
            sees = sees & (ahead < WINDOW)
        scores = tl.where(sees, scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet: 0 in place of -inf keeps its weights at 0.
        shift = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp(scores - shift[:, None])
        shrink = tl.exp(largest - shift)
        v = _numbers(values + place, v_scale, mask, CODES, q.dtype)
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = now
    if SINKS and not DIVIDES:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
        now = tl.maximum(largest, sink)
        shrink = tl.exp(largest - now)
        total = total * shrink + tl.exp(sink - now)
        out = out * shrink[:, None]
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    row = (first_row + token) * HEADS + head
    if DIVIDES:
        of_part = tl.where(total == 0.0, float("-inf"), largest + tl.log(tl.where(total == 0.0, 1.0, total)))
        tl.store(sums + row * parts + part, of_part, mask=is_row)
        row = row * parts + part
        is_row = is_row & (low + 0 * r < high)  # of a part without keys nothing is read
    place = row[:, None] * WIDTH + d[None, :]
    tl.store(made + place, out.to(made.dtype.element_ty), mask=is_row[:, None] & (d < WIDTH)[None, :])


@triton.jit
def _join(
    made,
    sums,
    sinks,
    out,
    parts,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One row of one head: its parts, each weighted by the sum of its exponentials, whose logarithm `sums` has."""
    row = tl.program_id(0).to(tl.int64)
    p, d = tl.arange(0, PARTS), tl.arange(0, PADDED)
    of_part = tl.load(sums + row * parts + p, mask=p < parts, other=float("-inf"))
    largest = tl.max(of_part, 0)
    if SINKS:
        sink = tl.load(sinks + row % HEADS).to(tl.float32)
        largest = tl.maximum(largest, sink)
    weights = tl.exp(of_part - largest)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp(sink - largest)
    is_place = (weights > 0.0)[:, None] & (d < WIDTH)[None, :]
    x = tl.load(made + (row * parts + p)[:, None] * WIDTH + d[None, :], mask=is_place, other=0.0)
    y = tl.sum(x * weights[:, None], 0) / total
    tl.store(out + row * WIDTH + d, y.to(out.dtype.element_ty), mask=d < WIDTH)
