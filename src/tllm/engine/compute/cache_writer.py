"""Writes the new keys and values of a batch into a layer's cache, as they are or rounded to codes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tllm.devices.choose import CPU
from tllm.engine.compute.cache_codes import CacheCoding, rounded
from tllm.engine.compute.kv_cache import KVCache, LayerCache, cache_writes, slot_runs
from tllm.engine.schedule.batch import BatchEntry
from tllm.kernels.gpu_kernels import GpuKernels, gpu_kernels
from tllm.kernels.library import kernels_for
from tllm.kernels.rows.processor_rows import write_codes


class CacheWriter(Protocol):
    """Writes a batch's new keys and values to their slots in a layer's cache."""

    def __call__(self, layer_cache: LayerCache, k_TKH: Tensor, v_TKH: Tensor) -> None: ...


def cache_writer(cache: KVCache, entries: tuple[BatchEntry, ...]) -> CacheWriter:
    """What writes a batch's rows, worked out once for all layers."""
    if cache.coding is not None:
        return CodeWriter(cache.coding, places_of(cache, entries))
    if cache.device == CPU:
        return PlainWriter(cache.page_size, entries)
    return ScatteredWriter(gpu_kernels(cache.device.type), places_of(cache, entries))


def places_of(cache: KVCache, entries: tuple[BatchEntry, ...]) -> Tensor:
    """The slot of each row of a batch, [T]."""
    runs = [run for entry in entries for run in slot_runs(entry, cache.page_size, entry.start, entry.stop)]
    return torch.tensor([slot for run in runs for slot in run]).to(cache.device)


class PlainWriter:
    """Copies rows to their slots."""

    def __init__(self, page_size: int, entries: tuple[BatchEntry, ...]) -> None:
        self.writes = cache_writes(page_size, entries)

    def __call__(self, layer_cache: LayerCache, k_TKH: Tensor, v_TKH: Tensor) -> None:
        for write in self.writes:
            write(layer_cache.keys, k_TKH)
            if layer_cache.values is not layer_cache.keys:
                write(layer_cache.values, v_TKH)


class ScatteredWriter:
    """Copies rows to their slots, all at once: what is best on a device, where each copy has to be started."""

    def __init__(self, kernels: GpuKernels | None, places_T: Tensor) -> None:
        self._kernels, self.places_T = kernels, places_T

    def __call__(self, layer_cache: LayerCache, k_TKH: Tensor, v_TKH: Tensor) -> None:
        keys, values = layer_cache.keys, layer_cache.values
        if self._kernels is not None:
            # Where values are the keys, they are written once more.
            new_TKH = k_TKH if values is keys else v_TKH
            self._kernels.rows.write_slots(k_TKH, new_TKH, self.places_T, keys, values)
            return
        keys.index_copy_(1, self.places_T, k_TKH.transpose(0, 1))
        if values is not keys:
            values.index_copy_(1, self.places_T, v_TKH.transpose(0, 1))


class CodeWriter:
    """Rounds rows, and writes their codes and scales to their slots: by a kernel, or by torch with the same bits."""

    def __init__(self, coding: CacheCoding, places_T: Tensor) -> None:
        self.coding, self.places_T = coding, places_T

    def __call__(self, layer_cache: LayerCache, k_TKH: Tensor, v_TKH: Tensor) -> None:
        assert layer_cache.key_scales is not None and layer_cache.value_scales is not None, "made with the codes"
        self._write(layer_cache.keys, layer_cache.key_scales, k_TKH)
        if layer_cache.values is not layer_cache.keys:
            self._write(layer_cache.values, layer_cache.value_scales, v_TKH)

    def _write(self, codes_KSH: Tensor, scales_KS1: Tensor, x_TKH: Tensor) -> None:
        kernels = kernels_for(x_TKH)
        if kernels is not None:
            write_codes(kernels, x_TKH, self.places_T, codes_KSH, scales_KS1)
            return
        codes_TKH, scales_TK1 = rounded(self.coding, x_TKH[: len(self.places_T)])
        codes_KSH.index_copy_(1, self.places_T, codes_TKH.transpose(0, 1))
        scales_KS1.index_copy_(1, self.places_T, scales_TK1.transpose(0, 1))
