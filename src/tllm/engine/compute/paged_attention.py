"""`PagedAttend`: attention of one batch over the paged cache; all that layers share is worked out once per batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tllm.engine.compute.kv_cache import KVCache, LayerCache
from tllm.engine.schedule.batch import Entry
from tllm.model.attention import AttentionSpec

SCORES_AT_ONCE = 2**24
"""Scores that the soft-capped path, which writes them out, holds at a time."""


@dataclass(frozen=True)
class AttentionSegment:
    """One entry's rows of the batch and the keys that they see, for one window.

    The keys are the rows' own (`fresh`: the sequence starts here), one run of slots (`first`, `length`), or scattered
    slots. `mask` is added to the scores.
    """

    start: int
    stop: int
    fresh: bool
    first: int
    length: int
    scattered: Tensor | None
    mask: Tensor | None


class PagedAttend:
    """Writes a batch's keys and values to their slots, then attends: a call for each layer.

    A sequence's cached keys are read in place where its pages follow one another, and gathered where they do not.
    """

    def __init__(self, cache: KVCache, entries: tuple[Entry, ...]) -> None:
        self.cache = cache
        self.layers = cache.layers
        self.entries = entries
        self.writes = _writes(cache.page_size, entries)
        self.readers: list[OneToken | Segments | None] = [None] * len(cache.kinds)

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        held = self.layers[layer]
        for write in self.writes:
            write(held.keys, k_TKH)
            write(held.values, v_TKH)
        reader = self.readers[held.kind]
        if reader is None:
            reader = self.readers[held.kind] = self._reader(self.cache.kinds[held.kind])
        return reader(held, q_TNH, k_TKH, v_TKH)

    def _reader(self, spec: AttentionSpec) -> OneToken | Segments:
        segments, row = [], 0
        for entry in self.entries:
            segments.append(_segment(self.cache, entry, row, spec))
            row += entry.count
        one = segments[0]
        if row == 1 and one.scattered is None and spec.softcap is None and spec.kv_index is None:
            return OneToken(spec, one)
        return Segments(self.cache, spec, segments)


class WriteRun:
    """Writes rows [start, stop) of a batch to slots that follow one another."""

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


class OneToken:
    """One new token of one sequence: the query heads that share a kv head are rows of one product, the cache a view."""

    def __init__(self, spec: AttentionSpec, segment: AttentionSegment) -> None:
        self.scale = spec.scale
        self.first, self.length = segment.first, segment.length

    def __call__(self, held: LayerCache, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        K, slots, H = held.keys.shape
        shape, strides, offset = (1, K, self.length, H), (0, slots * H, H, 1), self.first * H
        o_TKGH = F.scaled_dot_product_attention(
            q_TNH.view(1, K, -1, H),
            held.keys.as_strided(shape, strides, offset),
            held.values.as_strided(shape, strides, offset),
            scale=self.scale,
        )
        return o_TKGH.reshape(q_TNH.shape)


class Segments:
    """Any mixture of entries, one after another: measured faster than a padded gather from 64 tokens of context on."""

    def __init__(self, cache: KVCache, spec: AttentionSpec, segments: list[AttentionSegment]) -> None:
        self.spec = spec
        self.segments = segments
        self.groups = cache.groups.get(spec.kv_index) if spec.kv_index is not None else None
        self.attend = _plain if spec.softcap is None else _capped

    def __call__(self, held: LayerCache, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        if self.groups is not None:
            q_TNH = q_TNH[:, self.groups.pad]
        outs = [
            self.attend(
                self.spec,
                segment,
                q_TNH[segment.start : segment.stop],
                _visible(segment, held.keys, k_TKH),
                _visible(segment, held.values, v_TKH),
            )
            for segment in self.segments
        ]
        o_TNH = outs[0] if len(outs) == 1 else torch.cat(outs)
        return o_TNH if self.groups is None else o_TNH[:, self.groups.real]


def _plain(spec: AttentionSpec, segment: AttentionSegment, q_TNH: Tensor, k_KSH: Tensor, v_KSH: Tensor) -> Tensor:
    T, N, H = q_TNH.shape
    K = k_KSH.shape[0]
    k_1KSH, v_1KSH = k_KSH.unsqueeze(0), v_KSH.unsqueeze(0)
    if T == 1:
        o = F.scaled_dot_product_attention(q_TNH.view(1, K, N // K, H), k_1KSH, v_1KSH, scale=spec.scale)
        return o.reshape(1, N, H)
    o_1NTH = F.scaled_dot_product_attention(
        q_TNH.transpose(0, 1).unsqueeze(0),
        k_1KSH,
        v_1KSH,
        attn_mask=segment.mask,
        is_causal=segment.mask is None,
        scale=spec.scale,
        enable_gqa=N != K,
    )
    return o_1NTH[0].transpose(0, 1)


def _capped(spec: AttentionSpec, segment: AttentionSegment, q_TNH: Tensor, k_KSH: Tensor, v_KSH: Tensor) -> Tensor:
    """Attention with tanh-capped scores, written out: softmax in float32 at least, as such models are trained."""
    assert spec.softcap is not None
    T, N, H = q_TNH.shape
    K, S, _ = k_KSH.shape
    rows = max(1, SCORES_AT_ONCE // (N * S))
    outs = []
    for at in range(0, T, rows):
        q_TKGH = q_TNH[at : at + rows].reshape(-1, K, N // K, H)
        count = len(q_TKGH)
        q_KRH = q_TKGH.permute(1, 2, 0, 3).reshape(K, -1, H)
        scores_KRS = torch.matmul(q_KRH, k_KSH.transpose(1, 2)) * spec.scale
        scores_KRS = torch.tanh(scores_KRS / spec.softcap) * spec.softcap
        if segment.mask is not None:
            scores_KRS = (scores_KRS.view(K, -1, count, S) + segment.mask[at : at + rows]).view(K, -1, S)
        wide = torch.float64 if q_TNH.dtype == torch.float64 else torch.float32
        o_KRH = torch.matmul(scores_KRS.softmax(-1, dtype=wide).to(q_TNH.dtype), v_KSH)
        outs.append(o_KRH.view(K, -1, count, H).permute(2, 0, 1, 3).reshape(count, N, H))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _visible(segment: AttentionSegment, cache_KSH: Tensor, new_TKH: Tensor) -> Tensor:
    """The keys (or values) that a segment's rows see."""
    if segment.fresh:
        return new_TKH[segment.start : segment.stop].transpose(0, 1)
    if segment.scattered is not None:
        return cache_KSH.index_select(1, segment.scattered)
    return cache_KSH.narrow(1, segment.first, segment.length)


def _segment(cache: KVCache, entry: Entry, row: int, spec: AttentionSpec) -> AttentionSegment:
    low = 0 if spec.window is None else max(0, entry.start - spec.window + 1)
    runs = slot_runs(entry, cache.page_size, low, entry.stop)
    fresh = entry.start == 0
    return AttentionSegment(
        start=row,
        stop=row + entry.count,
        fresh=fresh,
        first=runs[0].start,
        length=entry.stop - low,
        scattered=None if fresh or len(runs) == 1 else torch.cat([torch.arange(r.start, r.stop) for r in runs]),
        mask=_mask(entry, low, spec, cache.dtype),
    )


def _mask(entry: Entry, low: int, spec: AttentionSpec, dtype: torch.dtype) -> Tensor | None:
    """0 where a row sees a key, -inf where not; None where it sees them all or plain causal attention says the same."""
    windowed = spec.window is not None and entry.count > spec.window
    if entry.count == 1 or (entry.start == 0 and not windowed and spec.softcap is None):
        return None
    distance = torch.arange(entry.start, entry.stop)[:, None] - torch.arange(low, entry.stop)[None, :]
    hidden = distance < 0 if spec.window is None else (distance < 0) | (distance >= spec.window)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def slot_runs(entry: Entry, page_size: int, start: int, stop: int) -> list[range]:
    """Slots of the positions [start, stop) of a sequence, as few runs as its table allows."""
    runs: list[range] = []
    at = 0  # position of the first token of this run of pages
    for first, count in entry.table:
        a, b = max(start, at), min(stop, at + count * page_size)
        if a < b:
            shift = first * page_size - at
            if runs and runs[-1].stop == a + shift:
                runs[-1] = range(runs[-1].start, b + shift)
            else:
                runs.append(range(a + shift, b + shift))
        at += count * page_size
    return runs


def _writes(page_size: int, entries: tuple[Entry, ...]) -> list[WriteRun | WriteScattered]:
    """How a batch's rows get to their slots: single tokens of many sequences together, longer pieces run by run."""
    writes: list[WriteRun | WriteScattered] = []
    singles = 0
    while singles < len(entries) and entries[singles].count == 1:
        singles += 1
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
