"""Rows of a batch that are divided among ranks with the same weights."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch

from tests.support.models.layouts import in_threads
from tllm.comm.collectives.group import local_groups, solo
from tllm.engine.grid.divided_tokens import DividedRows, own_entries
from tllm.engine.schedule.batch import BatchEntry

ENTRIES = (
    BatchEntry(1, 30, 1, 8, ((4, 2),)),
    BatchEntry(2, 7, 1, 8, ((6, 1),)),
    BatchEntry(3, 16, 10, 40, ((0, 3),), num_draft_tokens=2),
)


def places(entries: tuple[BatchEntry, ...]) -> list[tuple[int, int]]:
    """(sequence, position) of each row."""
    return [(entry.key, at) for entry in entries for at in range(entry.start, entry.stop)]


@pytest.mark.parametrize("bounds", [[0, 12], [0, 6, 12], [0, 1, 2, 12], [0, 5, 5, 12]])
def test_parts_of_entries_are_their_rows_in_order(bounds: list[int]) -> None:
    parts = [own_entries(ENTRIES, slice(a, b)) for a, b in pairwise(bounds)]
    assert [place for part in parts for place in places(part)] == places(ENTRIES)
    tables = {entry.key: entry.page_table for entry in ENTRIES}
    assert all(entry.page_table == tables[entry.key] for part in parts for entry in part)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
def test_rows_are_put_together_as_they_were(tokens: int) -> None:
    """Fewer tokens than ranks are not divided: each rank has all of them, and sends nothing."""
    x_TD, groups = torch.randn(tokens, 3), local_groups(3)
    divided = [DividedRows(tokens, group) for group in groups]
    assert {rows.is_divided for rows in divided} == {tokens >= 3}
    found = in_threads([partial(rows.put_together, x_TD[rows.own]) for rows in divided])
    assert all(torch.equal(one, x_TD) for one in found)
    sent = sum(sum(group.stats().values()) for group in groups)
    assert (sent > 0) == (tokens >= 3)


def test_a_rank_alone_divides_nothing() -> None:
    assert DividedRows(5, solo()).own == slice(0, 5)
