"""PagedAttend against one plain softmax over everything a sequence has, through scrambled pages and mixed batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tllm.engine.compute import attention_choice, segmented_attention
from tllm.engine.compute.kernel_attention import KernelAttention
from tllm.engine.compute.kv_cache import KVCache, slot_runs
from tllm.engine.compute.paged_attention import PagedAttend
from tllm.engine.compute.segmented_attention import ALIKE, SegmentedAttention
from tllm.engine.schedule.batch import BatchEntry
from tllm.engine.schedule.limits import Limits
from tllm.kernels.autotune import Autotuned
from tllm.kernels.fastest import Choice
from tllm.kernels.library import library
from tllm.model.attention import AttentionSpec

HEADS, KV_HEADS, WIDTH, PAGE = 4, 2, 32, 4
SHAPE = (KV_HEADS, WIDTH)
SPECS = {
    "plain": AttentionSpec(scale=0.3, kv_shape=SHAPE),
    "window": AttentionSpec(scale=0.25, window=7, kv_shape=SHAPE),
    "window_of_one": AttentionSpec(scale=0.25, window=1, kv_shape=SHAPE),
    "capped": AttentionSpec(scale=0.5, softcap=1.5, kv_shape=SHAPE),
    "capped_window": AttentionSpec(scale=0.5, softcap=2.0, window=5, kv_shape=SHAPE),
    "uneven": AttentionSpec(scale=0.3, kv_index=(0, 0, 0, 1), kv_shape=SHAPE),
    "uneven_start": AttentionSpec(scale=0.3, kv_index=(0, 1, 1, 1), kv_shape=SHAPE),
    "uneven_capped": AttentionSpec(scale=0.3, kv_index=(0, 1, 1, 1), softcap=1.0, window=6, kv_shape=SHAPE),
}


def reference(spec: AttentionSpec, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, start: int) -> Tensor:
    """Row by row and head by head."""
    out = torch.zeros(q_TNH.shape, dtype=torch.float64)
    for row in range(len(q_TNH)):
        position = start + row
        low = 0 if spec.window is None else max(0, position - spec.window + 1)
        for head in range(HEADS):
            kv = spec.kv_index[head] if spec.kv_index else head // (HEADS // KV_HEADS)
            keys, values = k_SKH[low : position + 1, kv].double(), v_SKH[low : position + 1, kv].double()
            scores = keys @ q_TNH[row, head].double() * spec.scale
            if spec.softcap is not None:
                scores = torch.tanh(scores / spec.softcap) * spec.softcap
            out[row, head] = torch.softmax(scores, 0) @ values
    return out


class Sequences:
    """Whole queries, keys and values of a few sequences, fed to the cache in pieces."""

    def __init__(self, lengths: list[int], dtype: torch.dtype, scrambled: bool, seed: int = 0) -> None:
        torch.manual_seed(seed)
        order = random.Random(seed)
        self.q = [torch.randn(n, HEADS, WIDTH, dtype=torch.float64).to(dtype) for n in lengths]
        # As the model gives them: k and v are parts of one wider tensor.
        kv = [torch.randn(n, 2 * KV_HEADS, WIDTH, dtype=torch.float64).to(dtype) for n in lengths]
        self.k, self.v = [x[:, :KV_HEADS] for x in kv], [x[:, KV_HEADS:] for x in kv]
        self.done = [0] * len(lengths)
        needs = [-(-n // PAGE) for n in lengths]
        pages = list(range(3, 3 + sum(needs)))
        if scrambled:
            order.shuffle(pages)
        self.tables: list[tuple[tuple[int, int], ...]] = []
        for need in needs:
            own, pages = pages[:need], pages[need:]
            self.tables.append(tuple((page, 1) for page in own) if scrambled else ((own[0], need),))
        self.limits = Limits(num_pages=3 + sum(needs), vocab_size=10, max_model_len=1000, page_size=PAGE)

    def batch(self, pieces: list[tuple[int, int]]) -> tuple[tuple[BatchEntry, ...], Tensor, Tensor, Tensor]:
        """`pieces` are (sequence, how many tokens)."""
        entries = []
        q, k, v = [], [], []
        for index, count in pieces:
            start = self.done[index]
            entries.append(BatchEntry(index, start, count, start + count, self.tables[index]))
            for parts, whole in ((q, self.q), (k, self.k), (v, self.v)):
                parts.append(whole[index][start : start + count])
            self.done[index] += count
        return tuple(entries), torch.cat(q), torch.cat(k), torch.cat(v)


STEPS = [
    [(0, 13), (1, 1), (2, 6)],
    [(1, 1), (2, 9), (0, 1)],
    [(0, 1), (1, 1), (2, 1)],
    [(0, 1)],
    [(1, 1), (0, 8), (2, 2)],
    [(2, 1), (1, 12)],
    [(0, 1), (2, 1), (1, 4)],
]


@pytest.mark.parametrize("scrambled", [False, True], ids=["one run", "scrambled"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_any_mixture_is_plain_attention(name: str, dtype: torch.dtype, scrambled: bool) -> None:
    check_mixtures(SPECS[name], dtype, scrambled)


@pytest.mark.parametrize("scrambled", [False, True], ids=["one run", "scrambled"])
@pytest.mark.parametrize("name", SPECS)
def test_rows_and_keys_are_few_numbers_where_torch_prepares_for_each(
    name: str, scrambled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, product = set[tuple[int, int]](), F.scaled_dot_product_attention

    def noting(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        shapes.add((q.shape[2], k.shape[2]))
        return product(q, k, v, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    monkeypatch.setattr(segmented_attention, "is_prepared", lambda dtype: True)
    check_mixtures(SPECS[name], torch.float64, scrambled)  # which goes by torch alone
    of_replies = {(rows, keys) for rows, keys in shapes if rows < HEADS}  # a row for each head of a group
    assert shapes - of_replies == {(ALIKE, ALIKE)}


@pytest.mark.parametrize(("window", "rows_of_masks"), [(None, {1}), (30, {1}), (7, {ALIKE})])
@torch.inference_mode()
def test_a_prompt_that_sees_all_of_itself_has_no_mask_of_a_row_each(
    window: int | None, rows_of_masks: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that were added are hidden from all rows alike; of a batch of 8,192 tokens a row each were 134 MB."""
    masks, product = list[Tensor](), F.scaled_dot_product_attention

    def noting(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, **more: Any) -> Tensor:
        masks.append(attn_mask)
        return product(q, k, v, attn_mask, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    monkeypatch.setattr(segmented_attention, "is_prepared", lambda dtype: True)
    spec = AttentionSpec(scale=0.3, window=window, kv_shape=SHAPE, bidirectional=True)
    sequences = Sequences([25, 20], torch.float64, scrambled=False)
    cache = KVCache({0: spec}, sequences.limits, torch.float64)
    entries, q, k, v = sequences.batch([(0, 25), (1, 20)])
    got = PagedAttend(cache, entries)(0, q, k, v)
    place = torch.arange(25)
    seen = (place[:, None] - place).abs() < (window or 99)
    for rows, count in ((slice(0, 25), 25), (slice(25, 45), 20)):
        parts = (x[rows].transpose(0, 1) for x in (q, k, v))
        want = product(*parts, attn_mask=seen[:count, :count], scale=0.3, enable_gqa=True).transpose(0, 1)
        torch.testing.assert_close(got[rows], want, rtol=0, atol=1e-12)
    assert {len(mask) for mask in masks} == rows_of_masks


@torch.inference_mode()
def check_mixtures(spec: AttentionSpec, dtype: torch.dtype, scrambled: bool) -> None:
    sequences = Sequences([25, 20, 20], dtype, scrambled)
    other = AttentionSpec(scale=1.0, kv_shape=SHAPE)
    cache = KVCache({3: spec, 5: other, 8: spec}, sequences.limits, dtype)
    for held in cache.layers.values():  # by others before, which is to reach nobody
        held.keys.fill_(float("nan"))
        held.values.fill_(float("nan"))
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}[dtype]
    for pieces in STEPS:
        entries, q, k, v = sequences.batch(pieces)
        attend = PagedAttend(cache, entries)
        for layer in (3, 5, 8):
            got = attend(layer, q, k, v)
            assert got.shape == q.shape and got.dtype == dtype
            row = 0
            for entry in entries:
                k_all, v_all = sequences.k[entry.key][: entry.stop], sequences.v[entry.key][: entry.stop]
                rows = slice(row, row + entry.count)
                want = reference(cache.kinds[cache.layers[layer].kind], q[rows], k_all, v_all, entry.start)
                torch.testing.assert_close(got[rows].double(), want, rtol=0, atol=tolerance)
                row += entry.count


@pytest.mark.skipif(library() is None or not library().has_tiles, reason="this processor has no AMX")
@pytest.mark.parametrize("scrambled", [False, True], ids=["one run", "scrambled"])
@pytest.mark.parametrize("name", SPECS)
def test_any_mixture_by_amx(name: str, scrambled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, also those that go on after others of their sequence; replies beside them go by the kernel."""
    chosen: list[str] = []

    def choose(candidates: dict[str, Callable[[], object]]) -> Choice:
        chosen.append("AMX" if "AMX" in candidates else "kernel")
        return Choice(chosen[-1], dict.fromkeys(candidates, 1.0))

    monkeypatch.setattr(attention_choice, "fastest", choose)
    monkeypatch.setattr(attention_choice, "choices", Autotuned("attention of prompts"))
    check_mixtures(SPECS[name], torch.bfloat16, scrambled)
    assert set(chosen) == {"AMX"}


@pytest.mark.parametrize("faster", ["kernel", "torch"])
@torch.inference_mode()
def test_prompts_are_computed_in_the_way_that_is_faster(faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured for the first of each kind; replies, and all of a cache that is exact, go by the kernel in any case."""
    measured: list[list[str]] = []

    def choose(candidates: dict[str, Callable[[], object]]) -> Choice:
        measured.append(list(candidates))
        return Choice(faster, dict.fromkeys(candidates, 1.0))

    monkeypatch.setattr(attention_choice, "fastest", choose)
    monkeypatch.setattr(attention_choice, "choices", Autotuned("attention of prompts"))
    for exact in (False, True):
        sequences = Sequences([20], torch.float32, scrambled=False)
        cache = KVCache({0: SPECS["plain"]}, sequences.limits, torch.float32, exact=exact)
        for pieces in ([(0, 4)], [(0, 4)], [(0, 1)]):
            entries, q, k, v = sequences.batch(pieces)
            attend = PagedAttend(cache, entries)
            attend(0, q, k, v)
            by_torch = faster == "torch" and not exact and pieces == [(0, 4)]
            assert isinstance(attend.readers[0], SegmentedAttention if by_torch else KernelAttention)
    assert measured == [["kernel", "torch"]] * 2, "of 4 and of 8 keys, once each"


@torch.inference_mode()
def test_capped_attention_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tllm.engine.compute.segmented_attention.SCORES_AT_ONCE", 200)
    sequences = Sequences([40], torch.float64, scrambled=True)
    cache = KVCache({0: SPECS["capped_window"]}, sequences.limits, torch.float64)
    for pieces in ([(0, 15)], [(0, 25)]):
        entries, q, k, v = sequences.batch(pieces)
        got = PagedAttend(cache, entries)(0, q, k, v)
        want = reference(SPECS["capped_window"], q, sequences.k[0], sequences.v[0], entries[0].start)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_slot_runs_join_pages_that_meet() -> None:
    entry = BatchEntry(0, 0, 1, 1, ((5, 2), (7, 1), (1, 2)))
    assert slot_runs(entry, 4, 0, 20) == [range(20, 32), range(4, 12)]
    assert slot_runs(entry, 4, 6, 14) == [range(26, 32), range(4, 6)]
    assert slot_runs(entry, 4, 19, 20) == [range(11, 12)]


def test_the_cache_counts_its_bytes() -> None:
    sizes = Limits(num_pages=5, vocab_size=10, max_model_len=1000, page_size=16)
    cache = KVCache(
        {n: replace(SPECS[of], kv_shape=(3, 8)) for n, of in enumerate(("plain", "window"))}, sizes, torch.bfloat16
    )
    assert cache.num_bytes == 2 * 2 * 5 * 16 * 3 * 8 * 2
