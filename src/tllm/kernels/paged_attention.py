"""Attention over the paged cache by our kernels: tiles of tokens, many sequences at once.

With that of csrc/paged_attention.c the outputs of a token have the same bits on every processor, whatever tile and
batch it is in and wherever its pages lie: so a prompt may be cut into pieces, found in the prefix cache or computed
again without a change of any number. That of csrc/attention_tiles.c, for prompts in bfloat16 on processors with AMX,
takes a fraction of the time and rounds weights to bfloat16, as torch's own attention does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tllm.kernels.library import DTYPE_NUMBERS, FLOAT8, LANES, AttentionArguments, Library, kernel_threads

MOST_HEAD_WIDTH, MOST_ROWS = 640, 128
"""The kernel has room for so wide heads, whose width is whole vectors, and for so many rows of a tile."""

ROWS = 32
"""Rows of a tile, which read keys together: its tokens times the query heads of a kv head."""

AMX_WIDTHS = range(32, 257, 32)
"""Widths of heads that the kernel for AMX takes."""


class TokenTile(NamedTuple):
    """Tokens of a batch that follow one another in a sequence: positions [start, stop), and where their keys lie.

    `runs` are the slots of the positions [first_key, stop), in order.
    """

    start: int
    stop: int
    first_key: int
    runs: Sequence[range]


class TileNumbers(NamedTuple):
    """What the kernel reads of `tiles` tiles, by the names of its arguments, each int64. Tiles may change in place.

    There is room for `most_keys` keys and `most_tokens` tokens of each.
    """

    arrays: dict[str, Tensor]
    tiles: int
    most_keys: int
    most_tokens: int


def fits(width: int, first_heads: Sequence[int]) -> bool:
    """Whether the kernel has room for heads of this width, and for as many as share a kv head."""
    return width % LANES == 0 and width <= MOST_HEAD_WIDTH and most_shared(first_heads) <= MOST_ROWS


def fits_amx(kernels: Library, width: int, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether the kernel for AMX is there and takes heads of this width, with queries and a cache of these dtypes. The
    other kernel must have room for them, too (`fits`)."""
    return kernels.has_tiles and set(dtypes) == {torch.bfloat16} and width in AMX_WIDTHS


def most_shared(first_heads: Sequence[int]) -> int:
    """The most query heads that share a kv head."""
    return max(b - a for a, b in itertools.pairwise(first_heads))


def tokens_of_tile(first_heads: Sequence[int], by_amx: bool = False) -> int:
    """How many tokens a tile has at the most."""
    return max(1, (MOST_ROWS if by_amx else ROWS) // most_shared(first_heads))


class TiledAttention:
    """Attention of a batch's tokens, one call for each layer.

    `tiles` may be given as what the kernel reads of them. `by_amx`: by the kernel for AMX (`fits_amx`).
    `first_heads` are the first query head of each kv head, and the number of heads at the end. A token sees the last
    `window` keys up to its own (None: all of them).
    """

    def __init__(
        self,
        kernels: Library,
        tiles: Sequence[TokenTile] | TileNumbers,
        first_heads: Sequence[int],
        scale: float,
        softcap: float = 0.0,
        window: int | None = None,
        by_amx: bool = False,
    ) -> None:
        self._attend = kernels.tiles.attention if by_amx else kernels.cache.paged_attention
        self._threads = kernel_threads()
        numbers = tiles if isinstance(tiles, TileNumbers) else numbers_of(tiles, window)
        most_rows = numbers.most_tokens * most_shared(first_heads)
        most_keys = -(-numbers.most_keys // LANES) * LANES
        assert most_rows <= MOST_ROWS, f"{most_rows} rows of a tile, and the kernel has room for {MOST_ROWS}"
        self._arrays = {**numbers.arrays, "first_head": torch.tensor(first_heads, dtype=torch.int64)}
        scores = 4 * self._threads * most_rows * most_keys
        scratch = kernels.tiles.attention_scratch_bytes(self._threads) if by_amx else scores
        self._scores = torch.empty(scratch, dtype=torch.uint8)
        self._arguments = AttentionArguments(
            **{name: x.data_ptr() for name, x in self._arrays.items()},
            scores=self._scores.data_ptr(),
            tiles=numbers.tiles,
            heads=first_heads[-1],
            kv_heads=len(first_heads) - 1,
            most_keys=most_keys,
            most_rows=most_rows,
            scale=scale,
            softcap=softcap,
        )

    def __call__(
        self,
        q_TNH: Tensor,
        keys_KSH: Tensor,
        values_KSH: Tensor,
        key_scales_KS1: Tensor | None = None,
        value_scales_KS1: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """[T, N, H], for q [T, N, H] and a layer's slots [K, slots, H], which are codes where there are scales.

        `sinks_N`: a score of each head that joins its softmax and has no value.
        """
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        a = self._arguments
        a.q, a.keys, a.values, a.out = (x.data_ptr() for x in (q_TNH, keys_KSH, values_KSH, out_TNH))
        a.q_stride, a.slots, a.width = q_TNH.stride(0), keys_KSH.shape[1], q_TNH.shape[2]
        a.dtype = a.cache_dtype = DTYPE_NUMBERS[q_TNH.dtype]
        if key_scales_KS1 is not None and value_scales_KS1 is not None:
            a.key_scales, a.value_scales = key_scales_KS1.data_ptr(), value_scales_KS1.data_ptr()
            a.cache_dtype = FLOAT8 if keys_KSH.dtype == torch.uint8 else DTYPE_NUMBERS[keys_KSH.dtype]
        if sinks_N is not None:
            sinks_N = sinks_N.float().contiguous()
            a.sinks = sinks_N.data_ptr()
        self._attend(a, self._threads)
        return out_TNH


def numbers_of(tiles: Sequence[TokenTile], window: int | None) -> TileNumbers:
    """What the kernel reads of tiles."""
    tokens = [(tile, at) for tile in tiles for at in range(tile.start, tile.stop)]
    first_keys = [0 if window is None else max(0, at - window + 1) for _, at in tokens]
    found = {
        "runs": [number for tile in tiles for run in tile.runs for number in (run.start, len(run))],
        "first_run": list(itertools.accumulate((len(tile.runs) for tile in tiles), initial=0)),
        "first_token": list(itertools.accumulate((tile.stop - tile.start for tile in tiles), initial=0)),
        "first_key": [first - tile.first_key for first, (tile, _) in zip(first_keys, tokens, strict=True)],
        "num_keys": [at + 1 - first for first, (_, at) in zip(first_keys, tokens, strict=True)],
    }
    arrays = {name: torch.tensor(numbers, dtype=torch.int64) for name, numbers in found.items()}
    most_keys = max(tile.stop - tile.first_key for tile in tiles)
    return TileNumbers(arrays, len(tiles), most_keys, max(tile.stop - tile.start for tile in tiles))
