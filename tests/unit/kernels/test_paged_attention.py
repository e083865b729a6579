"""Attention over the paged cache by the kernels: against float64, and the same bits however tokens are put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.support.models.few_bits import libraries
from tllm.kernels.paged_attention import TiledAttention, TokenTile

DTYPES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
HEADS, SCALE = [0, 2, 6], 0.2
"""Six query heads that share two kv heads unevenly."""


def single_tokens(runs: Sequence[Sequence[range]]) -> list[TokenTile]:
    """Tokens that each see all of their runs."""
    lengths = [sum(map(len, of_token)) for of_token in runs]
    return [TokenTile(n - 1, n, 0, of_token) for n, of_token in zip(lengths, runs, strict=True)]


def cut(start: int, stop: int, runs: Sequence[range], width: int, window: int | None = None) -> Iterator[TokenTile]:
    """The positions [start, stop) of one sequence, whose slots are `runs`, in tiles of at most `width` tokens."""
    slots = [slot for run in runs for slot in run]
    for at in range(start, stop, width):
        last, first_key = min(at + width, stop), 0 if window is None else max(0, at - window + 1)
        seen = slots[first_key:last]
        breaks = [0, *(i for i in range(1, len(seen)) if seen[i] != seen[i - 1] + 1), len(seen)]
        yield TokenTile(at, last, first_key, [range(seen[a], seen[b - 1] + 1) for a, b in pairwise(breaks)])


def written_out(
    q_TNH: Tensor, k_KSH: Tensor, v_KSH: Tensor, seen: list[Tensor], softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """The same in float64, one row after another; `seen` are each token's slots."""
    want = torch.empty(q_TNH.shape)
    for token, slots in enumerate(seen):
        for head in range(q_TNH.shape[1]):
            kv = int(head >= HEADS[1])
            scores = k_KSH[kv, slots].double() @ q_TNH[token, head].double() * SCALE
            scores = torch.tanh(scores / softcap) * softcap if softcap else scores
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            want[token, head] = scores.softmax(0)[: len(slots)] @ v_KSH[kv, slots].double()
    return want


def case(dtype: torch.dtype, tokens: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries that are part of wider rows, keys and values."""
    torch.manual_seed(0)
    keys, values = (torch.randn(2, 200, width).to(dtype) for _ in range(2))
    return torch.randn(tokens, 8, width).to(dtype)[:, :6], keys, values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_single_tokens_of_several_sequences(dtype: torch.dtype, width: int, softcap: float) -> None:
    q, keys, values = case(dtype, 3, width)
    runs = [[range(5, 6)], [range(16, 48), range(96, 130)], [range(200)]]
    seen = [torch.cat([torch.arange(run.start, run.stop) for run in of_token]) for of_token in runs]
    want = written_out(q, keys, values, seen, softcap)
    found = [
        TiledAttention(library, single_tokens(runs), HEADS, SCALE, softcap)(q, keys, values) for library in libraries()
    ]
    assert all(torch.equal(one, found[0]) for one in found) and found[0].dtype == dtype
    torch.testing.assert_close(found[0].float(), want, rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("window", [None, 1, 20, 40])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_a_prompt_has_the_same_bits_in_any_tiles(window: int | None, has_sinks: bool, softcap: float) -> None:
    """From the middle of a sequence on, over slots in three runs; under every instruction set, with any threads."""
    runs, start, stop = [range(100, 133), range(10, 60), range(150, 187)], 50, 119
    slots = torch.cat([torch.arange(run.start, run.stop) for run in runs])
    q, keys, values = case(torch.float32, stop - start, 64)
    sinks = torch.randn(6) * 3 if has_sinks else None
    first = [0 if window is None else max(0, at - window + 1) for at in range(start, stop)]
    seen = [slots[a : at + 1] for a, at in zip(first, range(start, stop), strict=True)]
    want = written_out(q, keys, values, seen, softcap, sinks)
    found, before = [], torch.get_num_threads()
    try:
        for library in libraries():
            for threads, width in ((1, 1), (2, 5), (1, 16), (2, 32)):
                torch.set_num_threads(threads)
                tiles = list(cut(start, stop, runs, width, window))
                attend = TiledAttention(library, tiles, HEADS, SCALE, softcap, window)
                found.append(attend(q, keys, values, sinks_N=sinks))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found[0], want, rtol=3e-6, atol=3e-6)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.skipif(not any(one.has_tiles for one in libraries()), reason="this processor has no AMX")
@pytest.mark.parametrize("width", [32, 64, 96, 256])
@pytest.mark.parametrize("window", [None, 1, 20, 300])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.0, False), (1.5, True)])
def test_prompts_by_amx(width: int, window: int | None, softcap: float, has_sinks: bool) -> None:
    """Over three blocks of keys whose slots are in four runs, in tiles that are full and not, with any threads."""
    runs, start, stop = [range(100, 433), range(500, 850), range(10, 60), range(900, 967)], 150, 800
    slots = torch.cat([torch.arange(run.start, run.stop) for run in runs])
    torch.manual_seed(0)
    keys, values = (torch.randn(2, 1000, width).bfloat16() for _ in range(2))
    q = torch.randn(stop - start, 8, width).bfloat16()[:, :6]
    sinks = torch.randn(6) * 3 if has_sinks else None
    hidden = torch.arange(stop) > torch.arange(start, stop)[:, None]
    if window is not None:
        hidden |= torch.arange(stop) <= torch.arange(start, stop)[:, None] - window
    want = torch.empty(q.shape)
    for head in range(6):
        k, v = (x[int(head >= HEADS[1]), slots[:stop]].float() for x in (keys, values))
        scores = q[:, head].float() @ k.T * SCALE
        scores = (torch.tanh(scores / softcap) * softcap if softcap else scores).masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[head].expand(len(scores), 1)), 1)
        want[:, head] = scores.softmax(1)[:, :stop] @ v
    library, before = next(one for one in libraries() if one.has_tiles), torch.get_num_threads()
    try:
        for threads, tokens in ((1, 32), (2, 21)):
            torch.set_num_threads(threads)
            tiles = list(cut(start, stop, runs, tokens, window))
            attend = TiledAttention(library, tiles, HEADS, SCALE, softcap, window, by_amx=True)
            torch.testing.assert_close(attend(q, keys, values, sinks_N=sinks).float(), want, rtol=2e-2, atol=2e-2)
    finally:
        torch.set_num_threads(before)


def test_bits_do_not_depend_on_where_pages_lie_or_who_is_beside() -> None:
    torch.manual_seed(0)
    keys, values, q = torch.randn(2, 300, 64), torch.randn(2, 300, 64), torch.randn(2, 4, 64)
    library = libraries()[0]
    alone = TiledAttention(library, single_tokens([[range(77)]]), [0, 2, 4], 0.1)(q[:1], keys, values)
    keys[:, 200:277], values[:, 200:277] = keys[:, :77].clone(), values[:, :77].clone()
    runs = [[range(200, 205), range(205, 240), range(240, 277)], [range(9, 150)]]
    assert torch.equal(TiledAttention(library, single_tokens(runs), [0, 2, 4], 0.1)(q, keys, values)[:1], alone)


def test_scores_that_are_no_numbers_stay_so() -> None:
    keys = values = torch.ones(1, 40, 16)
    keys[0, 33, 0] = float("nan")
    found = TiledAttention(libraries()[0], list(cut(30, 36, [range(40)], 6)), [0, 1], 1.0)(
        torch.ones(6, 1, 16), keys, values
    )
    assert found[:3].isfinite().all() and found[3:].isnan().all()
