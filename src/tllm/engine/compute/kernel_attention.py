"""Attention of a batch's entries over the paged cache by our kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from tllm.engine.compute.kv_cache import KVCache, LayerCache, slot_runs
from tllm.engine.schedule.batch import BatchEntry
from tllm.kernels.library import Library
from tllm.kernels.paged_attention import TiledAttention, TokenTile, tokens_of_tile
from tllm.model.attention import AttentionSpec


class KernelAttention:
    """The rows of `entries`, which are the first of a batch or all of them.

    `first_heads` are the first query head of each kv head, and the number of heads at the end.
    """

    by_amx = False
    """Which of the kernels it is (`kernels/paged_attention.py`)."""

    def __init__(
        self,
        kernels: Library,
        cache: KVCache,
        spec: AttentionSpec,
        entries: tuple[BatchEntry, ...],
        first_heads: tuple[int, ...],
    ) -> None:
        most = tokens_of_tile(first_heads, self.by_amx)
        tiles = [tile for entry in entries for tile in tiles_of(entry, cache.page_size, spec.window, most)]
        self.rows = sum(entry.count for entry in entries)
        softcap = spec.softcap or 0.0
        self._attend = TiledAttention(kernels, tiles, first_heads, spec.scale, softcap, spec.window, self.by_amx)

    def __call__(
        self, layer_cache: LayerCache, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        return self.of_rows(layer_cache, q_TNH[: self.rows], sinks_N)

    def of_rows(self, layer_cache: LayerCache, q_RNH: Tensor, sinks_N: Tensor | None) -> Tensor:
        """What comes out for the queries of the entries alone."""
        keys, values = layer_cache.keys, layer_cache.values
        return self._attend(q_RNH, keys, values, layer_cache.key_scales, layer_cache.value_scales, sinks_N)


class AmxAttention(KernelAttention):
    """The rows of `prompts`, which are the last of a batch, by the kernel for AMX; those of `replies` before them, if
    there are any, by the other one."""

    by_amx = True

    def __init__(
        self,
        kernels: Library,
        cache: KVCache,
        spec: AttentionSpec,
        prompts: tuple[BatchEntry, ...],
        first_heads: tuple[int, ...],
        replies: KernelAttention | None,
    ) -> None:
        super().__init__(kernels, cache, spec, prompts, first_heads)
        self._replies = replies

    def __call__(
        self, layer_cache: LayerCache, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        out_RNH = self.of_rows(layer_cache, q_TNH[-self.rows :], sinks_N)
        if self._replies is None:
            return out_RNH
        return torch.cat((self._replies(layer_cache, q_TNH, k_TKH, v_TKH, sinks_N), out_RNH))


def tiles_of(entry: BatchEntry, page_size: int, window: int | None, most: int) -> list[TokenTile]:
    """An entry's rows in tiles of at most so many tokens, and the slots of the keys that each sees."""
    tiles = []
    for start in range(entry.start, entry.stop, most):
        stop = min(start + most, entry.stop)
        first_key = 0 if window is None else max(0, start - window + 1)
        tiles.append(TokenTile(start, stop, first_key, slot_runs(entry, page_size, first_key, stop)))
    return tiles
