"""The cut axes: covered once, in proportion, for any number of ranks and any shares."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm.core.errors import PlanError
from tllm.spec.cut import cut_heads, kv_index, proportional, spread

shares_strategy = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


@given(st.integers(6, 5000), shares_strategy)
def test_proportional_covers_once_and_keeps_to_the_shares(total: int, shares: tuple[int, ...]) -> None:
    ranges = proportional(total, shares, "width")
    assert ranges[0][0] == 0 and ranges[-1][1] == total
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert all(stop > start for start, stop in ranges)
    if total >= 10 * sum(shares):
        for (start, stop), share in zip(ranges, shares, strict=True):
            assert abs((stop - start) - total * share / sum(shares)) <= 1


@given(st.integers(1, 8), st.integers(1, 8), shares_strategy)
def test_heads_are_held_once_and_find_their_kv_head(kv: int, group: int, shares: tuple[int, ...]) -> None:
    heads = kv * group
    if heads < len(shares):
        with pytest.raises(PlanError, match="cannot be cut"):
            cut_heads(heads, kv, shares)
        return
    ranges = cut_heads(heads, kv, shares)
    assert [head for start, stop in ranges for head in range(start, stop)] == list(range(heads))
    for start, stop in ranges:
        held = range(start // group, -(-stop // group))
        index = kv_index((start, stop), heads, kv)
        local = index or [n // ((stop - start) // len(held)) for n in range(stop - start)]
        assert [held[i] for i in local] == [head // group for head in range(start, stop)]


def test_equal_shares_cut_between_groups() -> None:
    assert cut_heads(16, 8, (1, 1, 1)) == ((0, 6), (6, 10), (10, 16))


def test_fewer_kv_heads_than_ranks_cuts_inside_a_group() -> None:
    assert cut_heads(8, 2, (1, 2, 1)) == ((0, 2), (2, 6), (6, 8))


@pytest.mark.parametrize(("experts", "ep"), [((0, 5), 2), ((2, 7), 5), ((0, 128), 3), ((3, 4), 1), ((0, 0), 1)])
def test_spread_gives_each_rank_a_fair_part(experts: tuple[int, int], ep: int) -> None:
    parts = spread(experts, ep)
    assert (parts[0][0], parts[-1][1]) == experts and all(a[1] == b[0] for a, b in pairwise(parts))
    sizes = [stop - first for first, stop in parts]
    assert max(sizes) - min(sizes) <= 1


def test_more_replicas_than_experts_are_refused() -> None:
    with pytest.raises(PlanError, match="3 experts of a rank cannot be spread over ep=4") as refused:
        spread((2, 5), 4)
    assert "at most 3" in refused.value.hint
    with pytest.raises(PlanError, match="0 experts"):
        spread((0, 0), 2)
