"""Attention for training against the plain one: values and gradients, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.models.packed_causal import PackedCausal
from tllm.model.attention import Attend, AttentionSpec
from tllm.training.attention import packed_attention as module
from tllm.training.attention import varlen_attention
from tllm.training.attention.packed_attention import TrainAttend
from tllm.training.attention.varlen_attention import VarlenAttend
from tllm.training.data.batch_tensors import Tokens

SPECS = {
    "plain": AttentionSpec(scale=0.3),
    "window": AttentionSpec(scale=0.3, window=5),
    "window of one": AttentionSpec(scale=0.3, window=1),
    "capped": AttentionSpec(scale=0.9, softcap=0.7),
    "capped window": AttentionSpec(scale=0.9, window=7, softcap=0.7),
    "uneven heads": AttentionSpec(scale=0.3, kv_index=(0, 1, 1, 1)),
    "uneven capped window": AttentionSpec(scale=0.3, window=3, softcap=0.5, kv_index=(0, 1, 1, 1)),
}
LENGTHS = ([23], [1], [4, 4, 4], [1, 1, 9, 2, 2, 30, 5])


def documents(lengths: list[int]) -> Tokens:
    return Tokens(*[torch.zeros(sum(lengths), dtype=torch.int64)] * 3, lengths)


def results(attend: Attend, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q_TNH, k_TKH, v_TKH)]
    out = attend(0, *leaves)
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), leaves)]


@pytest.mark.parametrize("rows", [4, 256])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_equals_the_plain_one(name: str, lengths: list[int], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", rows)
    chance = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(sum(lengths), n, 8, generator=chance, dtype=torch.float64) for n in (4, 2, 2))
    want = results(PackedCausal({0: SPECS[name]}, lengths), q, k, v)
    got = results(TrainAttend({0: SPECS[name]}, documents(lengths)), q, k, v)
    for ours, plain in zip(got, want, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [4, 256])
@pytest.mark.parametrize("name", SPECS)
def test_a_prefix_is_seen_as_if_each_document_began_with_it(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prefix that lies beside a document of its length, of one of a token, and gradients that add up in it."""
    monkeypatch.setattr(module, "ROWS_AT_ONCE", rows)
    lengths, prefixes = [9, 9, 4, 4, 6, 1, 2, 30], (None, None, 1, 1, 1, None, 5, 1)
    tokens = replace(documents(lengths), prefixes=prefixes)
    chance = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(sum(lengths), n, 8, generator=chance, dtype=torch.float64) for n in (4, 2, 2))
    places = torch.arange(sum(lengths)).split(lengths)
    whole = [(*([places[one]] if one is not None else []), own) for one, own in zip(prefixes, places, strict=True)]
    each = [torch.cat(parts) for parts in whole]
    own = torch.cat([torch.arange(len(x)) >= len(x) - n for x, n in zip(each, lengths, strict=True)])

    def written_out(layer: int, *of_tokens: Tensor) -> Tensor:
        plain = PackedCausal({0: SPECS[name]}, [len(x) for x in each])
        return plain(layer, *(x[torch.cat(each)] for x in of_tokens))[own]

    want = results(written_out, q, k, v)  # type: ignore[arg-type]
    got = results(TrainAttend({0: SPECS[name]}, tokens), q, k, v)
    for ours, plain in zip(got, want, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


def test_views_of_one_buffer_and_half_precision() -> None:
    """As the model gives them: slices of one projection, in bfloat16."""
    merged = torch.randn(12, 8, 16, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    q, k, v = merged.split([4, 2, 2], dim=1)
    out = TrainAttend({0: AttentionSpec(scale=0.25)}, documents([5, 7]))(0, q, k, v)
    want = PackedCausal({0: AttentionSpec(scale=0.25)}, [5, 7])(0, q.float(), k.float(), v.float())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), want, rtol=0, atol=0.02)
    out.sum().backward()
    assert merged.grad is not None and merged.grad[..., 0].abs().sum() > 0


def test_documents_do_not_see_each_other() -> None:
    q, k, v = (torch.randn(9, n, 8, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 2))
    attend = TrainAttend({0: AttentionSpec(scale=0.3)}, documents([4, 5]))
    before = attend(0, q, k, v)
    k[:4] += 100
    v[:4] -= 100
    assert torch.equal(attend(0, q, k, v)[4:], before[4:])


@pytest.mark.parametrize(
    ("name", "lengths", "dtype", "in_one"),
    [
        ("plain", [9, 30], torch.bfloat16, True),
        ("plain", [9, 9], torch.bfloat16, False),
        ("window", [9, 9], torch.bfloat16, True),
        ("window", [4, 4], torch.bfloat16, False),
        ("uneven heads", [9, 30], torch.bfloat16, True),
        ("capped", [9, 30], torch.bfloat16, False),
        ("plain", [9, 30], torch.float32, False),
    ],
)
def test_what_is_one_call_on_a_gpu(
    name: str, lengths: list[int], dtype: torch.dtype, in_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the plain attention in the kernel's place, which is told where documents start and how wide a window is."""
    calls = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *others: object, **options: object) -> list[Tensor]:
        calls.append(others)
        assert others[1:3] == (max(lengths),) * 2
        assert options["window_size_left"] == (4 if name == "window" else None)
        plain = AttentionSpec(scale=0.3, window=SPECS[name].window)
        return [PackedCausal({0: plain}, starts.diff().tolist())(0, q.float(), k.float(), v.float()).to(q.dtype)]

    monkeypatch.setattr(varlen_attention, "flash_attention", kernel)
    q, k, v = (torch.randn(sum(lengths), n, 8).to(dtype) for n in (4, 2, 2))
    got = VarlenAttend({0: SPECS[name]}, documents(lengths))(0, q, k, v)
    assert bool(calls) == in_one
    want = PackedCausal({0: SPECS[name]}, lengths)(0, q.float(), k.float(), v.float())
    torch.testing.assert_close(got.float(), want, rtol=0, atol=0.03)
