"""Packing: every token stands in one row, no row is too long, a stop in the middle changes nothing; fair dealing."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm.core.errors import PlanError
from tllm.training.data.packing import Packed, Packer, RowPiece, deal


def pack(packer: Packer, lengths: list[int], first: int = 0) -> list[Packed]:
    rows = [packer.place(RowPiece(first + i, 0, length)) for i, length in enumerate(lengths)]
    return [row for row in rows if row is not None]


def close(packer: Packer) -> list[Packed]:
    rows = []
    while (row := packer.close()) is not None:
        rows.append(row)
    return rows


LENGTHS = st.lists(st.integers(1, 16), max_size=80)


@given(LENGTHS, st.integers(0, 6))
def test_each_piece_stands_once_and_rows_are_never_too_long(lengths: list[int], open_rows: int) -> None:
    packer = Packer(16, open_rows)
    rows = pack(packer, lengths)
    assert len(packer.state()) <= open_rows
    rows += close(packer)
    assert sorted(piece for row in rows for piece in row) == [RowPiece(i, 0, n) for i, n in enumerate(lengths)]
    assert all(0 < sum(piece.length for piece in row) <= 16 for row in rows)


@given(LENGTHS, LENGTHS, st.integers(0, 6))
def test_going_on_from_a_state_is_the_same(before: list[int], after: list[int], open_rows: int) -> None:
    packer = Packer(16, open_rows)
    pack(packer, before)
    other = Packer(16, open_rows)
    other.restore(json.loads(json.dumps(packer.state())))
    assert pack(other, after, 100) == pack(packer, after, 100)
    assert close(other) == close(packer)


@given(LENGTHS)
def test_without_open_rows_each_piece_leaves_alone_and_in_order(lengths: list[int]) -> None:
    assert pack(Packer(16, 0), lengths) == [(RowPiece(i, 0, n),) for i, n in enumerate(lengths)]


def test_little_room_is_wasted() -> None:
    random.seed(0)
    lengths = [min(1024, int(random.lognormvariate(5, 1)) + 1) for _ in range(3000)]
    rows = pack(Packer(1024), lengths)
    filled = sum(piece.length for row in rows for piece in row) / (1024 * len(rows))
    assert filled > 0.98


@given(st.integers(0, 300), st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_dealing_gives_each_row_once_by_share(count: int, shares: list[int]) -> None:
    dealt = deal(count, shares)
    assert [row for rows in dealt for row in rows] == list(range(count))
    for rows, share in zip(dealt, shares, strict=True):
        assert abs(len(rows) - count * share / sum(shares)) < 1


def test_even_dealing_is_even() -> None:
    assert deal(8, (1, 1, 1, 1)) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert deal(8, (1, 3)) == [range(2), range(2, 8)]


@pytest.mark.parametrize("shares", [(), (1, 0), (2, -1)])
def test_shares_that_deal_nothing(shares: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="share"):
        deal(4, shares)


def test_a_piece_goes_where_it_leaves_the_least_room() -> None:
    packer = Packer(16, 3)
    assert pack(packer, [9, 11, 13]) == []
    assert pack(packer, [5], 3) == [(RowPiece(1, 0, 11), RowPiece(3, 0, 5))]
    assert pack(packer, [14, 15], 4) == [(RowPiece(5, 0, 15),)]  # the fullest leaves, the others wait for what fits
    assert [[piece[0] for piece in row] for row in packer.state()] == [[0], [2], [4]]
