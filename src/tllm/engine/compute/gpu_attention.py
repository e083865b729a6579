"""Attention of a batch's entries over the paged cache of a GPU, by our kernel there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tllm.engine.compute.kv_cache import KVCache, LayerCache
from tllm.engine.compute.positions import num_singles
from tllm.engine.compute.segmented_attention import SegmentedAttention
from tllm.engine.pages.page_table import pages_of
from tllm.engine.schedule.batch import BatchEntry
from tllm.kernels.gpu_kernels import GpuKernels, gpu_kernels
from tllm.model.attention import AttentionSpec, first_heads


class TileGroup(NamedTuple):
    """Rows [start, stop) of a batch, their tiles (`TokenTiles`), and in how many parts the keys of each are read."""

    start: int
    stop: int
    tiles: Any
    parts: int


def device_attention(
    cache: KVCache, spec: AttentionSpec, entries: tuple[BatchEntry, ...], q_TNH: Tensor
) -> KernelOnGpu | SegmentedAttention:
    """How a batch attends on a device that is not the processor: by our causal kernel where it fits, else by torch."""
    kernels = gpu_kernels(q_TNH.device.type)
    if kernels is None or spec.bidirectional or not kernels.attention.fits(q_TNH.shape[2], q_TNH.dtype):
        return SegmentedAttention(cache, spec, entries)
    firsts = first_heads(spec, q_TNH.shape[1], spec.kv_shape[0])
    groups = tile_groups(kernels, page_tables(cache, entries), entries, firsts)
    return KernelOnGpu(kernels, cache, spec, firsts, groups)


def page_tables(cache: KVCache, entries: tuple[BatchEntry, ...]) -> Tensor:
    """The pages of each sequence of a batch, int32 [sequences, pages] on the device."""
    pages = [pages_of(entry.page_table) for entry in entries]
    width = max(map(len, pages))
    return torch.tensor([row + [0] * (width - len(row)) for row in pages], dtype=torch.int32).to(cache.device)


class KernelOnGpu:
    """Attention of one kind for the rows of `groups`, which are all rows of a batch."""

    def __init__(
        self,
        kernels: GpuKernels,
        cache: KVCache,
        spec: AttentionSpec,
        firsts: tuple[int, ...],
        groups: Sequence[TileGroup],
    ) -> None:
        self._slots, self._groups = kernels.attention.LayerSlots, groups
        self._attend = kernels.attention.GpuAttention(
            firsts, spec.scale, spec.softcap, spec.window, cache.page_size, cache.device
        )

    def __call__(
        self, layer_cache: LayerCache, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        if q_TNH.stride()[1:] != (q_TNH.shape[2], 1):
            q_TNH = q_TNH.contiguous()
        slots = self._slots(layer_cache.keys, layer_cache.values, layer_cache.key_scales, layer_cache.value_scales)
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        for start, stop, tiles, parts in self._groups:
            self._attend(tiles, q_TNH[start:stop], slots, sinks_N, parts, out_TNH[start:stop])
        return out_TNH


def tile_groups(
    kernels: GpuKernels, tables: Tensor, entries: tuple[BatchEntry, ...], firsts: tuple[int, ...]
) -> list[TileGroup]:
    """The replies of a batch, which come first, and its prompts: these have larger tiles."""
    singles, whole = num_singles(entries), kernels.attention.tokens_of_tile(firsts)
    groups, start = [], 0
    for first, some, tokens in ((0, entries[:singles], 1), (singles, entries[singles:], whole)):
        if not some:
            continue
        made, row = list[tuple[int, int, int, int]](), 0
        for number, entry in enumerate(some, first):
            for at in range(0, entry.count, tokens):
                made.append((row + at, min(tokens, entry.count - at), entry.start + at, number))
            row += entry.count
        tiles = torch.tensor(made, dtype=torch.int32).to(tables.device)
        parts = kernels.attention.parts_of(len(made), len(firsts) - 1, max(entry.stop for entry in some))
        groups.append(TileGroup(start, start + row, kernels.attention.TokenTiles(tiles, tables, tokens), parts))
        start += row
    return groups
