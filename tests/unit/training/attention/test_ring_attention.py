"""Ring attention against the plain one: values and gradients on every rank, what travels, and what is in memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.support.models.layouts import in_threads
from tests.support.models.packed_causal import PackedCausal
from tests.unit.training.attention.test_packed_attention import LENGTHS, SPECS, documents
from tllm.comm.collectives.group import local_groups
from tllm.core.errors import LinkError
from tllm.model.attention import AttentionSpec
from tllm.training.attention import context_parallel as context
from tllm.training.attention.context_parallel import VisibleKeys, cut_tokens, zigzag
from tllm.training.attention.ring_attention import RingAttention, count
from tllm.training.data.batch_tensors import picked

Heads = list[Tensor]


def heads(tokens: int, dtype: torch.dtype = torch.float64, widths: tuple[int, int] = (4, 2)) -> Heads:
    """q, k, v and a gradient of the result, of a whole microbatch."""
    chance = torch.Generator().manual_seed(3)
    n, k = widths
    return [torch.randn(tokens, count, 8, generator=chance, dtype=torch.float64).to(dtype) for count in (n, k, k, n)]


def plain(spec: AttentionSpec, lengths: list[int], qkv: Heads) -> Heads:
    *leaves, gradient = (x.double() for x in qkv)
    leaves = [x.requires_grad_() for x in leaves]
    out = PackedCausal({0: spec}, lengths)(0, *leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def ringed(spec: AttentionSpec, lengths: list[int], qkv: Heads, ranks: int) -> tuple[Heads, list[dict[str, int]]]:
    """The same by so many ranks, put together; and the bytes that each rank's links moved."""
    groups = local_groups(ranks, name="cp")
    spans = zigzag(sum(lengths), ranks)

    def attend(rank: int) -> Heads:
        ring = RingAttention(groups[rank])
        *leaves, gradient = (picked(x, spans[rank]) for x in qkv)
        leaves = [x.requires_grad_() for x in leaves]
        out = ring({0: spec}, cut_tokens(documents(lengths), rank, ranks))(0, *leaves)
        results = [out.detach(), *torch.autograd.grad(out, leaves, gradient)]
        ring.close()
        return results

    of_ranks = in_threads([partial(attend, rank) for rank in range(ranks)])
    order = torch.cat([torch.arange(a, b) for of_rank in spans for a, b in of_rank]).argsort()
    whole = [torch.cat(parts)[order] for parts in zip(*of_ranks, strict=True)]
    return whole, [group.stats() for group in groups]


@pytest.mark.parametrize("at_once", [(3, 4), (128, 512)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_equals_the_plain_one(
    name: str, lengths: list[int], ranks: int, at_once: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "ROWS_AT_ONCE", at_once[0])
    monkeypatch.setattr(context, "KEYS_AT_ONCE", at_once[1])
    qkv = heads(sum(lengths))
    got, _ = ringed(SPECS[name], lengths, qkv, ranks)
    for ours, want in zip(got, plain(SPECS[name], lengths, qkv), strict=True):
        torch.testing.assert_close(ours, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 5e-7), (torch.bfloat16, 2.5e-3)], ids=str)
@pytest.mark.parametrize("name", ["plain", "uneven capped window"])
def test_sixteen_bit_numbers_are_rounded_where_they_come_and_go(name: str, dtype: torch.dtype, limit: float) -> None:
    """Off by about one rounding of the result (1.6e-3), as scores and sums are float32."""
    lengths = [64]
    qkv = heads(64, dtype)
    got, _ = ringed(SPECS[name], lengths, qkv, 3)
    for ours, want in zip(got, plain(SPECS[name], lengths, qkv), strict=True):
        assert ours.dtype == dtype
        assert float((ours.double() - want).norm() / want.norm()) < limit


def test_without_a_gradient_nothing_is_recorded() -> None:
    lengths, (q, k, v, _) = [11, 30], heads(41)
    groups, spans = local_groups(2), zigzag(41, 2)

    def attend(rank: int) -> Tensor:
        ring, (mine_q, mine_k, mine_v) = RingAttention(groups[rank]), (picked(x, spans[rank]) for x in (q, k, v))
        with torch.inference_mode():
            out = ring({0: SPECS["window"]}, cut_tokens(documents(lengths), rank, 2))(0, mine_q, mine_k, mine_v)
        ring.close()
        return out

    outs = in_threads([partial(attend, rank) for rank in range(2)])
    want = PackedCausal({0: SPECS["window"]}, lengths)(0, q, k, v)
    for rank in range(2):
        torch.testing.assert_close(outs[rank], picked(want, spans[rank]), rtol=0, atol=1e-12)
        assert not outs[rank].requires_grad


def test_a_rank_that_is_gone_is_named() -> None:
    q, k, v, _ = heads(20)
    alive, gone = local_groups(2, name="cp")
    gone.close()
    ring, spans = RingAttention(alive), zigzag(20, 2)
    with pytest.raises(LinkError, match="rank 1"):
        ring({0: SPECS["plain"]}, cut_tokens(documents([20]), 0, 2))(0, *(picked(x, spans[0]) for x in (q, k, v)))
    ring.close()


lengths_of_documents = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(tokens=st.integers(0, 200), ranks=st.integers(1, 9))
def test_each_token_is_on_one_rank_and_ranks_have_as_many(tokens: int, ranks: int) -> None:
    spans = zigzag(tokens, ranks)
    assert sorted(place for of_rank in spans for a, b in of_rank for place in range(a, b)) == list(range(tokens))
    counts = [count(of_rank) for of_rank in spans]
    assert max(counts) - min(counts) <= 2
    assert all(a < b for of_rank in spans for a, b in of_rank)


@given(lengths=lengths_of_documents, ranks=st.integers(1, 5), window=st.none() | st.integers(1, 50))
def test_exactly_the_keys_that_are_seen_travel(lengths: list[int], ranks: int, window: int | None) -> None:
    """`seen` against every pair of places, written out; and tiles that hold each seen pair once."""
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    total = len(document)

    def sees(q: int, k: int) -> bool:
        return document[q] == document[k] and q >= k and (window is None or q - k < window)

    sight, spans = VisibleKeys(lengths, window), zigzag(total, ranks)
    for mine, theirs in ((a, b) for a in range(ranks) for b in range(ranks) if a != b):
        want = {k for k in places(spans[theirs]) if any(sees(q, k) for q in places(spans[mine]))}
        assert set(places(sight.seen(spans[mine], spans[theirs]))) == want
    met = torch.zeros(total, total, dtype=torch.int64)
    for mine in range(ranks):
        for theirs in range(ranks):
            for tile in sight.tiles(spans[mine], spans[theirs]):
                q, k = torch.tensor(places(spans[mine]))[tile.rows], torch.tensor(places(spans[theirs]))[tile.keys]
                assert (int(q[0]), int(k[0])) == (tile.row_place, tile.key_place)
                mask = sight.mask(tile)
                assert tile.masked == (not bool(mask.all()))
                met[q[:, None], k] += mask
    assert met.tolist() == [[int(sees(q, k)) for k in range(total)] for q in range(total)]


def places(spans: tuple[tuple[int, int], ...] | list[tuple[int, int]]) -> list[int]:
    return [place for a, b in spans for place in range(a, b)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_bytes_on_the_links_are_those_of_the_formula(ranks: int, dtype: torch.dtype) -> None:
    """Of one document of T tokens rank r sends (n - 1 + r) T / 2 n keys and values, and once more backward; and it
    returns the gradients of what it was sent."""
    piece = 7
    total = 2 * ranks * piece
    _, moved = ringed(SPECS["plain"], [total], heads(total, dtype), ranks)
    token = 2 * 2 * 8 * dtype.itemsize  # k and v, kv heads, width
    for rank, stats in enumerate(moved):
        sent = sum(nbytes for link, nbytes in stats.items() if link.startswith(f"{rank}>"))
        keys, returned = (ranks - 1 + rank) * piece, (2 * (ranks - 1) - rank) * piece
        assert sent == (2 * keys + returned) * token


def test_documents_that_lie_on_one_rank_are_not_sent() -> None:
    """Two pieces a rank: each document fills one, and nobody else sees it."""
    _, moved = ringed(SPECS["plain"], [10] * 6, heads(60), 3)
    assert all(nbytes == 0 for stats in moved for nbytes in stats.values())


def test_a_window_sends_only_its_width() -> None:
    window, token = 5, 2 * 2 * 8 * 8
    _, moved = ringed(AttentionSpec(scale=0.3, window=window), [80], heads(80), 2)
    # Pieces 0 | 1 2 | 3: rank 1 needs the end of piece 0, and rank 0 that of piece 2.
    assert [stats["0>1"] for stats in moved] == [3 * (window - 1) * token] * 2
    assert [stats["1>0"] for stats in moved] == [3 * (window - 1) * token] * 2


class _Live(TorchFunctionMode):
    """The most bytes of memory that tensors made here held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.held = [held for held in self.held if held() is not None] + [weakref.ref(result)]
            alive = [tensor for tensor in (held() for held in self.held) if tensor is not None]
            memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}
            self.most = max(self.most, sum(memory.values()))
        return result


def most_live(total: int, ranks: int) -> int:
    """Bytes that the first rank has of its own at one time, forward and backward,."""
    groups, spans, qkv = local_groups(ranks), zigzag(total, ranks), heads(total)

    def attend(rank: int) -> int:
        live, ring = _Live(), RingAttention(groups[rank])
        *leaves, gradient = (picked(x, spans[rank]) for x in qkv)
        leaves = [x.requires_grad_() for x in leaves]
        tokens = cut_tokens(documents([total]), rank, ranks)
        with live:
            out = ring({0: SPECS["capped"]}, tokens)(0, *leaves)
            out.backward(gradient)
        ring.close()
        return live.most

    return in_threads([partial(attend, rank) for rank in range(ranks)])[0]


def test_memory_grows_with_the_tokens_of_a_rank_and_never_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "ROWS_AT_ONCE", 16)
    monkeypatch.setattr(context, "KEYS_AT_ONCE", 32)
    tile, queries, scores = 4 * 16 * 32 * 8, 128 * 4 * 8 * 8, 4 * 128 * 384 * 8
    few, many = most_live(384, 3), most_live(768, 3)
    assert few < 4 * tile + 8 * queries < scores / 4
    assert many - few < 8 * queries, "twice the tokens: twice what is kept of each, and the same tiles"
    # Of the rounds a rank has now, one more block of keys and values may have come before it is wanted.
    block = 2 * queries
    assert most_live(768, 6) < few + tile + block, "on twice the ranks as much each as before"
