"""Attention of a batch's entries over the paged cache by our kernel."""

from __future__ import annotations

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

    def __init__(
        self,
        kernels: Library,
        cache: KVCache,
        spec: AttentionSpec,
        entries: tuple[BatchEntry, ...],
        first_heads: tuple[int, ...],
    ) -> None:
        most = tokens_of_tile(first_heads)
        tiles = [tile for entry in entries for tile in tiles_of(entry, cache.page_size, spec.window, most)]
        self.rows = sum(entry.count for entry in entries)
        self._attend = TiledAttention(kernels, tiles, first_heads, spec.scale, spec.softcap or 0.0, spec.window)

    def __call__(
        self, layer_cache: LayerCache, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        return self._attend(
            q_TNH[: self.rows],
            layer_cache.keys,
            layer_cache.values,
            layer_cache.key_scales,
            layer_cache.value_scales,
            sinks_N,
        )


def tiles_of(entry: BatchEntry, page_size: int, window: int | None, most: int) -> list[TokenTile]:
    """An entry's rows in tiles of at most so many tokens, and the slots of the keys that each sees."""
    tiles = []
    for start in range(entry.start, entry.stop, most):
        stop = min(start + most, entry.stop)
        first_key = 0 if window is None else max(0, start - window + 1)
        tiles.append(TokenTile(start, stop, first_key, slot_runs(entry, page_size, first_key, stop)))
    return tiles
