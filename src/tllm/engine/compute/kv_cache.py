"""The paged KV cache of one rank: the memory of its layers' keys and values, and the slots that a batch writes.

Every layer has `num_pages * page_size` slots for one token's keys and values each. The scheduler's `PagePool` gives
pages to sequences; a batch entry's `page_table` says which. Page p is the slots [p * page_size, (p + 1) * page_size).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tllm.devices.choose import CPU
from tllm.engine.compute.cache_codes import CacheCoding, coding_of
from tllm.engine.compute.positions import num_singles
from tllm.engine.compute.recurrent_states import RecurrentStates, zeroed
from tllm.engine.schedule.batch import BatchEntry
from tllm.engine.schedule.limits import Limits
from tllm.model.attention import AttentionSpec
from tllm.model.recurrence import StateShape

NO_STATES: Mapping[int, StateShape] = {}


@dataclass(frozen=True)
class HeadGroups:
    """How query heads share kv heads where they do not divide evenly: even groups, padded by repeating a query head.

    `padded_heads` are the query heads to compute, group after group; `real` are the places of the model's heads among
    them. Padding queries costs a few rows; repeating keys and values instead would copy the whole context.
    """

    size: int
    padded_heads: Tensor
    real: Tensor


@dataclass(frozen=True)
class LayerCache:
    """One layer's slots, [kv heads, slots, head width]: a head's keys lie together, which is how they are read.

    `kind` is the layer's `AttentionSpec`, as an index into `KVCache.kinds`. Keys and values that are codes
    (`cache_codes`) have scales, [kv heads, slots, 1].
    """

    keys: Tensor
    values: Tensor
    kind: int
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that holds pages, each [kv heads, slots, ...]: keys, values unless they are the keys, scales."""
        held = {id(x): x for x in (self.keys, self.values, self.key_scales, self.value_scales) if x is not None}
        return tuple(held.values())


class KVCache:
    """Every layer's slots on this rank, and the `kinds` of attention that read them.

    `is_exact`: what is read has the same bits however a prompt is cut and whatever else is in its batch. That is so for
    a cache of codes, and where asked for, as with weights of few bits, whose products have that property. Processors
    keep to it; on other devices the keys of a token are divided by how many tokens a batch has.
    Layers with a state in place of keys and values have theirs in `states`, a slot for each running sequence.

    All of it lies on `device`, and is written once when made, so that a lack of memory shows now and not while serving:
    it raises `CapacityError`. Other devices than the processor have one more page, `spare_page`, which no sequence is
    given: rows that only fill up a batch have theirs there (`decode_graphs`).
    """

    def __init__(
        self,
        specs: dict[int, AttentionSpec],
        limits: Limits,
        dtype: torch.dtype,
        state_shapes: Mapping[int, StateShape] = NO_STATES,
        exact: bool = False,
        device: torch.device = CPU,
    ) -> None:
        self.page_size, self.spare_page, self.device = limits.page_size, limits.num_pages, device
        self.dtype = dtype
        self.coding = coding_of(limits.kv_cache_dtype)
        self.is_exact = exact or self.coding is not None
        self.num_slots = (limits.num_pages + (device != CPU)) * limits.page_size
        self.kinds = list(dict.fromkeys(specs.values()))
        self.layers: dict[int, LayerCache] = {}
        for layer, spec in specs.items():
            kv_heads, head_dim = spec.kv_shape
            shape = (kv_heads, self.num_slots, head_dim)
            keys, key_scales = _slots(shape, dtype, self.coding, device)
            values, value_scales = keys, key_scales
            if not spec.values_are_keys:
                values, value_scales = _slots(shape, dtype, self.coding, device)
            self.layers[layer] = LayerCache(keys, values, self.kinds.index(spec), key_scales, value_scales)
        self.states = RecurrentStates(state_shapes, limits.num_state_slots, dtype, device)
        uneven = [spec.kv_index for spec in self.kinds if spec.kv_index is not None]
        self.groups = {index: _head_groups(index, device) for index in uneven}

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values, and of their scales."""
        return sum(x.nbytes for layer in self.layers.values() for x in layer.tensors())


class WriteRun:
    """Writes rows [start, stop) of a batch to slots that follow one another, from `slot` on."""

    def __init__(self, start: int, stop: int, slot: int) -> None:
        self.start, self.stop, self.slot = start, stop, slot

    def __call__(self, cache_KSH: Tensor, new_TKH: Tensor) -> None:
        heads, slots, width = cache_KSH.shape
        count = self.stop - self.start
        place_TKH = cache_KSH.as_strided((count, heads, width), (width, slots * width, 1), self.slot * width)
        place_TKH.copy_(new_TKH[self.start : self.stop] if self.stop - self.start < len(new_TKH) else new_TKH)


class WriteScattered:
    """Writes the first rows of a batch to slots anywhere."""

    def __init__(self, slots: list[int]) -> None:
        self.count = len(slots)
        self.slots = torch.tensor(slots)

    def __call__(self, cache_KSH: Tensor, new_TKH: Tensor) -> None:
        cache_KSH.index_copy_(1, self.slots, new_TKH[: self.count].transpose(0, 1))


def cache_writes(page_size: int, entries: tuple[BatchEntry, ...]) -> list[WriteRun | WriteScattered]:
    """How a batch's rows get to their slots: single tokens of many sequences together, longer pieces run by run."""
    writes: list[WriteRun | WriteScattered] = []
    singles = num_singles(entries)
    if singles > 1:
        writes.append(WriteScattered([slot_runs(e, page_size, e.start, e.stop)[0].start for e in entries[:singles]]))
    else:
        singles = 0
    row = singles
    for entry in entries[singles:]:
        for run in slot_runs(entry, page_size, entry.start, entry.stop):
            writes.append(WriteRun(row, row + len(run), run.start))
            row += len(run)
    return writes


def slot_runs(entry: BatchEntry, page_size: int, start: int, stop: int) -> list[range]:
    """Slots of the positions [start, stop) of a sequence, as few runs as its page table allows."""
    runs: list[range] = []
    at = 0  # position of the first token of this run of pages
    for first, count in entry.page_table:
        a, b = max(start, at), min(stop, at + count * page_size)
        if a < b:
            shift = first * page_size - at
            if runs and runs[-1].stop == a + shift:
                runs[-1] = range(runs[-1].start, b + shift)
            else:
                runs.append(range(a + shift, b + shift))
        at += count * page_size
    return runs


def _slots(
    shape: tuple[int, int, int], dtype: torch.dtype, coding: CacheCoding | None, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Room for keys, or for values: numbers of `dtype`, or codes and their scales."""
    if coding is None:
        return _zeros(shape, dtype, device), None
    return _zeros(shape, coding.dtype, device), _zeros((*shape[:2], 1), torch.float32, device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    what = f"cache ({shape[1]} tokens of one layer)"
    return zeroed(shape, dtype, device, what, "give the cache fewer tokens")


def _head_groups(kv_index: tuple[int, ...], device: torch.device) -> HeadGroups:
    """Even groups for `kv_index`, which names each query head's kv head."""
    groups = [[head for head, kv in enumerate(kv_index) if kv == wanted] for wanted in range(max(kv_index) + 1)]
    size = max(map(len, groups))
    padded = [group[min(place, len(group) - 1)] for group in groups for place in range(size)]
    real = [padded.index(head) for head in range(len(kv_index))]
    return HeadGroups(size, torch.tensor(padded).to(device), torch.tensor(real).to(device))
