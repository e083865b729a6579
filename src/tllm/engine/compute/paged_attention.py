"""`PagedAttend`: attention of one batch over the paged KV cache, called once for each layer.

A batch mixes prompts (many rows of a sequence) and replies (one row each, which come first). A call first writes the
batch's new keys and values to their slots, then attends. What is the same for all layers of one kind (masks, slots) is
worked out once for each batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from tllm.engine.compute.attention_choice import AttentionKind, fastest_way
from tllm.engine.compute.cache_writer import cache_writer
from tllm.engine.compute.gpu_attention import device_attention
from tllm.engine.compute.kernel_attention import AmxAttention, KernelAttention
from tllm.engine.compute.kv_cache import KVCache, LayerCache
from tllm.engine.compute.positions import num_singles
from tllm.engine.compute.recurrent_states import StateRuns
from tllm.engine.compute.segmented_attention import SegmentedAttention
from tllm.engine.schedule.batch import BatchEntry
from tllm.kernels.library import kernels_for
from tllm.kernels.paged_attention import fits, fits_amx
from tllm.model.attention import AttentionSpec, first_heads
from tllm.model.recurrence import Advance


class BatchAttention(Protocol):
    """Attention of a batch's rows, once their keys and values are in the cache."""

    def __call__(
        self, layer_cache: LayerCache, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor: ...


Ways = dict[str, Callable[[], BatchAttention]]
"""What makes each way to attend, by its name."""


class PagedAttend:
    """The model's `Attend` for one batch: (layer, q [T, N, H], k [T, K, H], v [T, K, H], sinks [N]) -> [T, N, H].

    Replies are computed by the kernel. So are prompts where the cache `is_exact`, so that no number depends on how they
    are cut; else by a kernel or by torch, whichever is fastest here. Other devices than processors have their own way.
    """

    def __init__(self, cache: KVCache, entries: tuple[BatchEntry, ...]) -> None:
        self.cache = cache
        self.layers = cache.layers
        self.entries = entries
        self.write = cache_writer(cache, entries)
        self.readers: list[BatchAttention | None] = [None] * len(cache.kinds)
        self.state_runs: StateRuns | None = None

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        layer_cache = self.layers[layer]
        self.write(layer_cache, k_TKH, v_TKH)
        reader = self.readers[layer_cache.kind]
        if reader is None:
            spec = self.cache.kinds[layer_cache.kind]
            if q_TNH.is_cpu:
                ways, kind = self._ways(spec, q_TNH)
                reader = fastest_way(kind, ways, lambda way: way(layer_cache, q_TNH, k_TKH, v_TKH, sinks_N))
            else:
                reader = device_attention(self.cache, spec, self.entries, q_TNH)
            self.readers[layer_cache.kind] = reader
        return reader(layer_cache, q_TNH, k_TKH, v_TKH, sinks_N)

    def recur(self, layer: int, advance: Advance, *rows: Tensor) -> Tensor:
        """Take the states of a layer that has those in place of keys and values over this batch."""
        if self.state_runs is None:
            self.state_runs = StateRuns(self.cache.states, self.entries)
        return self.state_runs.recur(layer, advance, *rows)

    def _ways(self, spec: AttentionSpec, q_TNH: Tensor) -> tuple[Ways, AttentionKind]:
        """How layers of this kind can attend in this batch, and what kind of attention it is."""
        cache, entries = self.cache, self.entries
        firsts = first_heads(spec, q_TNH.shape[1], spec.kv_shape[0])
        kernels = kernels_for(q_TNH) if fits(q_TNH.shape[2], firsts) and not spec.bidirectional else None  # causal
        replies, prompts = entries[: num_singles(entries)], entries[num_singles(entries) :]
        kind = AttentionKind.of(spec, prompts, q_TNH, spec.kv_shape[0])
        if kernels is None:
            return {"torch": lambda: SegmentedAttention(cache, spec, entries)}, kind
        ways: Ways = {"kernel": lambda: KernelAttention(kernels, cache, spec, entries, firsts)}
        if prompts and not cache.is_exact:
            first = KernelAttention(kernels, cache, spec, replies, firsts) if replies else None
            ways["torch"] = lambda: SegmentedAttention(cache, spec, entries, first)
            if cache.coding is None and fits_amx(kernels, q_TNH.shape[2], (q_TNH.dtype, cache.dtype)):
                ways["AMX"] = lambda: AmxAttention(kernels, cache, spec, prompts, firsts, first)
        return ways, kind
