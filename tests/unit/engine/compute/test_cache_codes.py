"""A paged cache in one byte each: whatever a batch mixes, attention is that over the rows as they were rounded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.models.rounded_rows import rounded_rows
from tests.unit.engine.compute.test_paged_attention import KV_HEADS, PAGE, SPECS, STEPS, WIDTH, Sequences, reference
from tllm.core.errors import ConfigError
from tllm.engine.compute import cache_codes, cache_writer
from tllm.engine.compute.cache_codes import FP8, INT8, coding_of, numbers_of, rounded
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.compute.paged_attention import PagedAttend
from tllm.engine.schedule.batch import BatchEntry
from tllm.engine.schedule.limits import Limits
from tllm.model.attention import AttentionSpec

KINDS = ("int8", "fp8")
SIZES = Limits(num_pages=5, vocab_size=10, max_model_len=1000, page_size=16)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 3e-6, torch.bfloat16: 3e-2}


def coded(limits: Limits, kind: str) -> Limits:
    return Limits(num_pages=limits.num_pages, vocab_size=10, max_model_len=1000, page_size=PAGE, kv_cache_dtype=kind)


def largest_fault(spec: AttentionSpec, dtype: torch.dtype, kind: str, neighbours: bool = False) -> float:
    """Of all steps and sequences, beside float64 over rows rounded by the twin. `neighbours` gives each kv head the
    scales of the next one, as a mutation."""
    sequences = Sequences([25, 20, 20], dtype, scrambled=True)
    cache = KVCache({3: spec}, coded(sequences.limits, kind), dtype)
    k, v = ([rounded_rows(kind, x)[2] for x in whole] for whole in (sequences.k, sequences.v))
    worst = 0.0
    for pieces in STEPS:
        entries, q, k_new, v_new = sequences.batch(pieces)
        attend = PagedAttend(cache, entries)
        if neighbours:
            attend.write = _Shifted(attend.write)
        got, row = attend(3, q, k_new, v_new), 0
        assert got.shape == q.shape and got.dtype == dtype
        for entry in entries:
            rows = slice(row, row + entry.count)
            want = reference(spec, q[rows], k[entry.key][: entry.stop], v[entry.key][: entry.stop], entry.start)
            worst = max(worst, float((got[rows].double() - want).abs().max()))
            row += entry.count
    return worst


class _Shifted:
    def __init__(self, write: cache_writer.PlainWriter | cache_writer.CodeWriter) -> None:
        self.write = write

    def __call__(self, layer_cache: cache_writer.LayerCache, k_TKH: Tensor, v_TKH: Tensor) -> None:
        self.write(layer_cache, k_TKH, v_TKH)
        assert layer_cache.key_scales is not None
        layer_cache.key_scales.copy_(layer_cache.key_scales.roll(1, 0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", SPECS)
@torch.inference_mode()
def test_any_mixture_is_attention_over_rounded_rows(name: str, dtype: torch.dtype, kind: str) -> None:
    assert largest_fault(SPECS[name], dtype, kind) < TOLERANCE[dtype]


@torch.inference_mode()
def test_scales_of_the_neighbour_head_show() -> None:
    assert largest_fault(SPECS["plain"], torch.float32, "int8", neighbours=True) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_kernels_and_torch_write_the_same_bytes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences([25, 20, 20], torch.bfloat16, scrambled=True)
    caches = []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(cache_writer, "kernels_for", lambda x: None)
        sequences.done = [0, 0, 0]
        cache = KVCache({0: SPECS["plain"]}, coded(sequences.limits, kind), torch.bfloat16)
        for pieces in STEPS:
            entries, _, k, v = sequences.batch(pieces)
            cache_writer.cache_writer(cache, entries)(cache.layers[0], k, v)
        caches.append(cache.layers[0].tensors())
    assert len(caches[0]) == 4
    assert all(torch.equal(one, other) for one, other in zip(*caches, strict=True))


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.0070), ("fp8", 0.027)])
def test_how_far_codes_are_from_normal_numbers(kind: str, most: float) -> None:
    """Relative, root mean square; a scale for each row makes it the same for rows of every size."""
    torch.manual_seed(0)
    coding = coding_of(kind)
    assert coding is not None
    for size in (1e-20, 1e-3, 1.0, 1e4):
        x_TKH = torch.randn(50, 4, 128) * size
        read = numbers_of(*rounded(coding, x_TKH), torch.float32)
        error = ((read - x_TKH).double().square().mean() / x_TKH.double().square().mean()).sqrt()
        assert most / 2 < error < most


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_is_read_as_no_number_and_no_other_is(kind: str, wrong: float) -> None:
    coding = coding_of(kind)
    assert coding is not None
    x_TKH = torch.randn(3, 2, 8)
    x_TKH[1, 0, 3] = wrong
    codes, scales = rounded(coding, x_TKH)
    read = numbers_of(codes, scales, torch.float32)
    assert not codes[1, 0].any() and not scales[1, 0].isfinite().any() and not read[1, 0].isfinite().any()
    assert read.isfinite().sum() == x_TKH.numel() - 8


def test_the_cache_counts_codes_and_scales() -> None:
    latent = AttentionSpec(scale=1.0, values_are_keys=True, kv_shape=(3, 8))
    plain_spec = replace(SPECS["plain"], kv_shape=(3, 8))
    for kind in KINDS:
        sizes = Limits(num_pages=5, vocab_size=10, max_model_len=1000, page_size=16, kv_cache_dtype=kind)
        cache = KVCache({0: plain_spec, 1: latent}, sizes, torch.bfloat16)
        both, one = (cache.layers[layer].tensors() for layer in (0, 1))
        assert [tuple(x.shape) for x in both] == [(3, 80, 8), (3, 80, 8), (3, 80, 1), (3, 80, 1)]
        assert [tuple(x.shape) for x in one] == [(3, 80, 8), (3, 80, 1)]
        assert cache.num_bytes == 3 * 3 * 80 * (8 + 4) == sum(x.nbytes for x in (*both, *one))
    plain = KVCache({0: plain_spec, 1: latent}, SIZES, torch.bfloat16)
    assert [len(plain.layers[layer].tensors()) for layer in (0, 1)] == [2, 1]
    assert cache.is_exact and not plain.is_exact, "a row is read back with the same bits however its prompt is cut"


@torch.inference_mode()
def test_slots_that_hold_what_is_not_a_number_reach_nobody() -> None:
    sequences = Sequences([25, 20, 20], torch.float32, scrambled=True)
    cache = KVCache({0: SPECS["plain"]}, coded(sequences.limits, "int8"), torch.float32)
    for held in cache.layers[0].tensors():
        held.fill_(float("nan") if held.is_floating_point() else 77)
    for pieces in STEPS:
        entries, q, k, v = sequences.batch(pieces)
        assert torch.isfinite(PagedAttend(cache, entries)(0, q, k, v)).all()


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_latents_are_rounded_once_and_read_twice(kind: str) -> None:
    spec = AttentionSpec(scale=0.3, values_are_keys=True, kv_shape=(1, WIDTH))
    sizes = Limits(num_pages=4, vocab_size=10, max_model_len=64, page_size=4, kv_cache_dtype=kind)
    cache = KVCache({0: spec}, sizes, torch.float32)
    torch.manual_seed(0)
    q, latents = torch.randn(9, 4, WIDTH), torch.randn(9, 1, WIDTH)
    read = rounded_rows(kind, latents)[2].expand(-1, KV_HEADS, -1)
    for start, stop in ((0, 5), (5, 8), (8, 9)):
        entry = BatchEntry(0, start, stop - start, stop, ((1, 3),))
        got = PagedAttend(cache, (entry,))(0, q[start:stop], latents[start:stop], latents[start:stop])
        want = reference(spec, q[start:stop], read[:stop], read[:stop], start)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-6)


def test_caches_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (coding_of("auto"), coding_of("int8"), coding_of("fp8"), coding_of("fp8_e4m3")) == (None, INT8, FP8, FP8)
    with pytest.raises(ConfigError, match="'int4', and a cache is one of 4 kinds") as fault:
        coding_of("int4")
    assert fault.value.hint == "give auto, int8, fp8, fp8_e4m3; auto is the model's dtype"
    monkeypatch.setattr(cache_codes, "E4M3", None)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'fp8', and torch .* has no float8_e4m3fn") as fault:
        coding_of("fp8")
    assert "int8" in fault.value.hint
    assert coding_of("int8") is INT8
