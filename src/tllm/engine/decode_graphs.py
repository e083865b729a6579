"""`DecodeGraphs`: a stage's layers over a decode batch, captured once as CUDA graphs and replayed for every token.

A token of a reply costs a GPU little, and hundreds of small kernels in each step cost the host more to start than the
GPU to compute. A graph starts them all at once. It reads and writes the same memory each time, so a batch's numbers are
copied to where the graph finds them. There is a graph for each of some sizes of batches; a batch between two of them is
filled up with rows whose keys go to the cache's spare page and whose results nobody reads.

The weights too are read where they lay when it was recorded. A trainer may change them there; where they have moved
(`addresses_of`), the graphs are to be recorded again.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tllm.core.errors import CapacityError
from tllm.engine.compute.cache_writer import CacheWriter, CodeWriter, ScatteredWriter
from tllm.engine.compute.gpu_attention import KernelOnGpu, TileGroup
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.row_numbers import HostNumbers, PackedNumbers
from tllm.engine.schedule.batch import Batch
from tllm.engine.schedule.limits import Limits
from tllm.kernels.gpu_kernels import GpuKernels, gpu_kernels
from tllm.model.attention import first_heads
from tllm.model.recurrence import Advance
from tllm.model.transformer import Transformer

WARM_UPS = 2
"""Runs before recording, in which kernels are compiled and libraries take their rooms."""

_recording = threading.Lock()
"""Ranks may be threads of this process. One that begins to record waits for all that its device was told, and so it may
not while another one records there."""


class RecordedBatch(NamedTuple):
    """The graph of one size, and the hidden states that it makes, [size, width]."""

    graph: torch.cuda.CUDAGraph
    x_TD: Tensor


class DecodeGraphs:
    """The graphs of one stage, recorded when this is made: at once, as the first request must not wait for it.

    CapacityError where the device has no memory for them.
    """

    def __init__(self, model: Transformer, cache: KVCache, limits: Limits, kernels: GpuKernels) -> None:
        self._model, self._cache, self._kernels = model, cache, kernels
        self._most_keys, most = limits.max_model_len, limits.max_num_seqs
        self._sizes = sizes_up_to(most)
        pages = -(-limits.max_model_len // limits.page_size)
        first, second = (HostNumbers(most, pages, cache.page_size, cache.spare_page) for _ in range(2))
        self._hosts = itertools.cycle((first, second))
        self._packed = PackedNumbers(most, pages, cache.device)
        self._packed.of_rows(most).copy_(first.of_rows(most))
        self._device = self._packed.rows
        self._received_TD = torch.zeros(most, model.received_width, dtype=cache.dtype, device=cache.device)
        self.recorded: dict[int, RecordedBatch] = {}
        try:
            with _recording:
                self._record_all()
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{cache.device} has no memory to record steps of up to {most} sequences: {str(error).splitlines()[0]}",
                "let fewer run at once (--max-num-seqs), or give the cache less (--kv-cache-memory)",
            ) from error

    def takes(self, batch: Batch) -> bool:
        """Whether a batch is one of replies alone, a token of each, without adapters, and no larger than recorded."""
        rows = len(batch.entries)
        is_decode = rows == len(batch.token_ids) and not any(entry.lora for entry in batch.entries)
        return is_decode and rows <= self._sizes[-1]

    def __call__(self, batch: Batch, x_TD: Tensor | None) -> Tensor:
        """The hidden states after the stage's layers; those before them are `x_TD`, of a stage that is not the first.

        They are overwritten by the next call. The batch before the last one must have come to its results: the device
        may still be reading the host's numbers until then.
        """
        rows = len(batch.entries)
        self._bring(batch)
        if x_TD is not None:
            self._received_TD[:rows].copy_(x_TD)
        return self._replay(rows)

    def follow(self, batch: Batch, sources: Sequence[int], tokens_R: Tensor) -> Tensor:
        """The same of a batch whose ids are on the device alone: of `tokens_R`, those at `sources`. The host need not
        know them."""
        rows = len(batch.entries)
        self._bring(batch, sources)
        self._device.ids[:rows].copy_(tokens_R.index_select(0, self._device.sources[:rows]))
        return self._replay(rows)

    def _bring(self, batch: Batch, sources: Sequence[int] = ()) -> None:
        """Copy a batch's numbers to the device."""
        size, host = self._size_of(len(batch.entries)), next(self._hosts)
        host.write(batch, size, sources)
        self._packed.of_rows(size).copy_(host.of_rows(size), non_blocking=True)

    def _replay(self, rows: int) -> Tensor:
        recorded = self.recorded[self._size_of(rows)]
        recorded.graph.replay()
        return recorded.x_TD[:rows]

    def _size_of(self, rows: int) -> int:
        return next(size for size in self._sizes if size >= rows)

    def _record_all(self) -> None:
        pool = None
        for size in reversed(self._sizes):  # the largest first: the others find room in its memory
            self.recorded[size] = self._record(size, pool)
            pool = self.recorded[size].graph.pool()

    def _record(self, size: int, pool: Any) -> RecordedBatch:
        stream = recording_stream(self._cache.device)
        stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._compute(size)
        torch.cuda.current_stream(self._cache.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other ranks may be threads of this process and use the device as they like.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            x_TD = self._compute(size)
        return RecordedBatch(graph, x_TD)

    def _compute(self, size: int) -> Tensor:
        ids, positions, places, _, tiles, tables = (x[:size] for x in self._device)
        x = ids if self._model.is_first else self._received_TD[:size]
        attend = RecordedAttend(self._kernels, self._cache, places, tiles, tables, self._most_keys)
        x_TD: Tensor = self._model(x, positions, attend, ids_T=ids)
        return x_TD


class RecordedAttend:
    """The model's `Attend` for a batch whose numbers lie where a graph finds them."""

    def __init__(
        self, kernels: GpuKernels, cache: KVCache, places: Tensor, tiles: Tensor, tables: Tensor, most_keys: int
    ) -> None:
        self._kernels, self._cache, self._most_keys = kernels, cache, most_keys
        self._tiles = kernels.attention.TokenTiles(tiles, tables, 1)
        self._write: CacheWriter = ScatteredWriter(kernels, places)
        if cache.coding is not None:
            self._write = CodeWriter(cache.coding, places.long())
        self._readers: dict[int, KernelOnGpu] = {}

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        layer_cache = self._cache.layers[layer]
        self._write(layer_cache, k_TKH, v_TKH)
        reader = self._readers.get(layer_cache.kind)
        if reader is None:
            reader = self._readers[layer_cache.kind] = self._reader(layer_cache.kind, q_TNH.shape[1])
        return reader(layer_cache, q_TNH, k_TKH, v_TKH, sinks_N)

    def recur(self, layer: int, advance: Advance, *rows: Tensor) -> Tensor:
        raise AssertionError("models with states in place of keys are not recorded")

    def _reader(self, kind: int, heads: int) -> KernelOnGpu:
        spec, size = self._cache.kinds[kind], len(self._tiles.tiles)
        firsts = first_heads(spec, heads, spec.kv_shape[0])
        parts = self._kernels.attention.parts_of(size, len(firsts) - 1, self._most_keys)
        return KernelOnGpu(self._kernels, self._cache, spec, firsts, [TileGroup(0, size, self._tiles, parts)])


def addresses_of(model: Transformer) -> tuple[int, ...]:
    """Where each weight lies now."""
    return tuple(parameter.data_ptr() for parameter in model.parameters())


@functools.cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all sizes, as libraries keep a room of their own for each stream that they were called on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def sizes_up_to(most: int) -> list[int]:
    """Sizes of batches that have graphs: powers of two to 16, then multiples of 16, and the most."""
    sizes = [1, 2, 4, 8, *range(16, most, 16)]
    return [*(size for size in sizes if size < most), most]


def decode_graphs(model: Transformer, cache: KVCache, limits: Limits) -> DecodeGraphs | None:
    """The graphs of a stage that is not cut among ranks; None where its layers cannot be recorded.

    That is so beside CUDA and without our kernels for it; with experts, whose rows the host counts; with states in
    place of keys; and where rope goes by the length of a sequence.
    """
    kernels = gpu_kernels(cache.device.type) if cache.device.type == "cuda" else None
    if kernels is None or cache.states.layers or model.scales_by_length:
        return None
    if any(layer.moe is not None for layer in model.spec.layers):
        return None
    if not all(kernels.attention.fits(spec.kv_shape[1], cache.dtype) for spec in cache.kinds):
        return None
    return DecodeGraphs(model, cache, limits, kernels)
