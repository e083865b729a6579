"""Attention over the paged cache in torch, one entry of a batch after another, where no kernel is used.

Of 16-bit numbers torch's product keeps what it has prepared for each number of rows and keys for ever, some 80 KB
(docs/log/memory.md). So both are rounded up, by rows of nothing and keys that no row of the entry sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tllm.devices.choose import CPU
from tllm.engine.compute.cache_codes import numbers_of
from tllm.engine.compute.kernel_attention import KernelAttention
from tllm.engine.compute.kv_cache import KVCache, LayerCache, slot_runs
from tllm.engine.schedule.batch import BatchEntry
from tllm.kernels.float_product import is_prepared
from tllm.model.attention import AttentionSpec

SCORES_AT_ONCE = 2**24
"""Scores that the path for caps and sinks, which writes them out, has in memory at a time."""


ALIKE = 32
"""Numbers of rows, and of keys, up to a multiple of this count as the same where torch prepares for each."""


@dataclass(frozen=True)
class AttentionSegment:
    """One entry's rows [start, stop) of the batch and the keys that they see, for one kind of attention.

    The keys are one of three: the rows' own, where the sequence starts here (`is_fresh`) and they were not rounded to
    codes; one run of slots (`first_slot`, `length`); or `scattered` slots. `mask` [rows, keys] is added to the scores;
    it has one row where all see the same keys. `padding` rows are added, of which nothing is wanted, and where keys are
    the rows' own as many of these.
    """

    start: int
    stop: int
    padding: int
    is_fresh: bool
    first_slot: int
    length: int
    scattered: Tensor | None
    mask: Tensor | None


def is_written_out(spec: AttentionSpec) -> bool:
    """Whether scores are written out: torch's own product neither caps them nor adds a sink."""
    return spec.softcap is not None or spec.sinks


class SegmentedAttention:
    """The first entries by `first`, if that is given; the rest by torch, one entry after another.

    A sequence's cached keys are read in place where its pages follow one another and no keys are added; else they are
    gathered.
    """

    def __init__(
        self,
        cache: KVCache,
        spec: AttentionSpec,
        entries: tuple[BatchEntry, ...],
        first: KernelAttention | None = None,
    ) -> None:
        self.spec, self.first = spec, first
        self.segments, row = [], 0
        for entry in entries:
            if first is None or row >= first.rows:
                self.segments.append(_segment(cache, entry, row, spec))
            row += entry.count
        self.groups = cache.groups.get(spec.kv_index) if spec.kv_index is not None else None

    def __call__(
        self, layer_cache: LayerCache, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None
    ) -> Tensor:
        keys, values, *scales = layer_cache.keys, layer_cache.values, layer_cache.key_scales, layer_cache.value_scales
        first = [] if self.first is None else [self.first(layer_cache, q_TNH, k_TKH, v_TKH, sinks_N)]
        if self.groups is not None:
            q_TNH = q_TNH[:, self.groups.padded_heads]
            sinks_N = None if sinks_N is None else sinks_N[self.groups.padded_heads]
        attend = partial(_written_out, sinks_N) if is_written_out(self.spec) else _plain
        outputs = [
            attend(
                self.spec,
                segment,
                q_TNH[segment.start : segment.stop],
                _visible(segment, keys, scales[0], k_TKH),
                _visible(segment, values, scales[1], v_TKH),
            )
            for segment in self.segments
        ]
        if self.groups is not None:
            outputs = [o_TNH[:, self.groups.real] for o_TNH in outputs]
        return outputs[0] if len(outputs) + len(first) == 1 else torch.cat(first + outputs)


def _plain(spec: AttentionSpec, segment: AttentionSegment, q_TNH: Tensor, k_KSH: Tensor, v_KSH: Tensor) -> Tensor:
    """Attention of one segment by torch's own product."""
    T, N, H = q_TNH.shape
    K = k_KSH.shape[0]
    if segment.padding:
        q_TNH = F.pad(q_TNH, (0, 0, 0, 0, 0, segment.padding))
    k_1KSH, v_1KSH = k_KSH.unsqueeze(0), v_KSH.unsqueeze(0)
    if T == 1:
        o = F.scaled_dot_product_attention(q_TNH.view(1, K, N // K, H), k_1KSH, v_1KSH, scale=spec.scale)
        return o.reshape(1, N, H)
    o_1NTH = F.scaled_dot_product_attention(
        q_TNH.transpose(0, 1).unsqueeze(0),
        k_1KSH,
        v_1KSH,
        attn_mask=segment.mask,
        is_causal=segment.mask is None and not spec.bidirectional,
        scale=spec.scale,
        enable_gqa=N != K,
    )
    return o_1NTH[0].transpose(0, 1)[:T]


def _written_out(
    sinks_N: Tensor | None,
    spec: AttentionSpec,
    segment: AttentionSegment,
    q_TNH: Tensor,
    k_KSH: Tensor,
    v_KSH: Tensor,
) -> Tensor:
    """Attention with capped scores or with sinks: softmax in float32 at least, as such models are trained."""
    T, N, H = q_TNH.shape
    K, S, _ = k_KSH.shape
    rows = max(1, SCORES_AT_ONCE // (N * S))
    outputs = []
    for at in range(0, T, rows):
        q_TKGH = q_TNH[at : at + rows].reshape(-1, K, N // K, H)
        count = len(q_TKGH)
        q_KRH = q_TKGH.permute(1, 2, 0, 3).reshape(K, -1, H)
        scores_KRS = torch.matmul(q_KRH, k_KSH.transpose(1, 2)) * spec.scale
        if spec.softcap is not None:
            scores_KRS = torch.tanh(scores_KRS / spec.softcap) * spec.softcap
        if segment.mask is not None:
            scores_KRS = (scores_KRS.view(K, -1, count, S) + segment.mask[at : at + rows]).view(K, -1, S)
        if sinks_N is not None:
            sinks_KR1 = sinks_N.view(K, -1, 1).expand(-1, -1, count).reshape(K, -1, 1)
            scores_KRS = torch.cat((scores_KRS, sinks_KR1), -1)
        softmax_dtype = torch.float64 if q_TNH.dtype == torch.float64 else torch.float32
        o_KRH = torch.matmul(scores_KRS.softmax(-1, dtype=softmax_dtype)[..., :S].to(q_TNH.dtype), v_KSH)
        outputs.append(o_KRH.view(K, -1, count, H).permute(2, 0, 1, 3).reshape(count, N, H))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _visible(segment: AttentionSegment, cache_KSH: Tensor, scales_KS1: Tensor | None, new_TKH: Tensor) -> Tensor:
    """The keys (or values) that a segment's rows see, [kv heads, keys, head width]."""
    if segment.is_fresh:
        own_KSH = new_TKH[segment.start : segment.stop].transpose(0, 1)
        return F.pad(own_KSH, (0, 0, 0, segment.padding)) if segment.padding else own_KSH
    if scales_KS1 is not None:
        return numbers_of(_in_slots(segment, cache_KSH), _in_slots(segment, scales_KS1), new_TKH.dtype)
    return _in_slots(segment, cache_KSH)


def _in_slots(segment: AttentionSegment, cache_KSH: Tensor) -> Tensor:
    """What the cache has in the slots that a segment's rows see."""
    if segment.scattered is not None:
        return cache_KSH.index_select(1, segment.scattered)
    return cache_KSH.narrow(1, segment.first_slot, segment.length)


def _segment(cache: KVCache, entry: BatchEntry, row: int, spec: AttentionSpec) -> AttentionSegment:
    """The segment of an entry whose first row in the batch is `row`."""
    first_key = 0 if spec.window is None else max(0, entry.start - spec.window + 1)
    runs = slot_runs(entry, cache.page_size, first_key, entry.stop)
    is_fresh, length = entry.start == 0 and cache.coding is None, entry.stop - first_key
    rounds = entry.count > 1 and cache.device == CPU and is_prepared(cache.dtype) and not is_written_out(spec)
    rows, keys = (-entry.count % ALIKE, -length % ALIKE) if rounds else (0, 0)
    in_place = is_fresh or (len(runs) == 1 and not keys)
    return AttentionSegment(
        start=row,
        stop=row + entry.count,
        padding=rows,
        is_fresh=is_fresh,
        first_slot=runs[0].start,
        length=length,
        scattered=None if in_place else _slots_of(runs, keys).to(cache.device),
        mask=_mask(entry, first_key, spec, cache, (rows, keys)),
    )


def _slots_of(runs: list[range], padding: int) -> Tensor:
    """The slots of the runs, and the first of them again and again."""
    slots = torch.cat([torch.arange(run.start, run.stop) for run in runs])
    return torch.cat((slots, slots[:1].expand(padding)))


def _mask(
    entry: BatchEntry, first_key: int, spec: AttentionSpec, cache: KVCache, padding: tuple[int, int]
) -> Tensor | None:
    """0 where a row sees a key, -inf where not; None where it sees them all or plain causal attention says the same.
    One row stands for all of a prompt that sees all of itself: in rows of their own, a long one's would be too many.

    The rows and keys of the `padding` are taken to come after all others, and no row sees them.
    """
    is_windowed = spec.window is not None and entry.count > spec.window
    if spec.bidirectional and not is_windowed and not padding[1]:
        return None
    if entry.count == 1 or (
        not spec.bidirectional and entry.start == 0 and not is_windowed and not is_written_out(spec)
    ):
        return None
    rows = torch.arange(entry.start, entry.stop + padding[0], device=cache.device)
    if spec.bidirectional and not is_windowed:
        rows = rows[:1]
    keys = torch.arange(first_key, entry.stop + padding[1], device=cache.device)
    last = rows if not spec.bidirectional else torch.full_like(rows, entry.stop - 1)
    if spec.bidirectional and spec.window is not None:
        last = last.minimum(rows + spec.window - 1)
    hidden = keys[None, :] > last[:, None]  # a batch may have all of a long prompt: of these there are many
    if spec.window is not None:
        hidden |= keys[None, :] <= rows[:, None] - spec.window
    return torch.zeros(hidden.shape, dtype=cache.dtype, device=cache.device).masked_fill_(hidden, float("-inf"))
