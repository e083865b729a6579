"""Rows as tensors: all tokens in one line, filled to a width where asked, filling never learned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tllm.training.data.batch_tensors import tokens_of
from tllm.training.data.packing import PackedRow, RowPiece


def row(*lengths: int) -> PackedRow:
    ids = np.arange(1, sum(lengths) + 1)
    positions = np.concatenate([np.arange(n) for n in lengths])
    return PackedRow(0, ids, ids + 1, positions, lengths, tuple(RowPiece(0, 0, n) for n in lengths))


def test_rows_in_one_line() -> None:
    found = tokens_of([row(2, 1), row(3)])
    assert found.ids_T.tolist() == [1, 2, 3, 1, 2, 3]
    assert found.labels_T.tolist() == [2, 3, 4, 2, 3, 4]
    assert found.positions_T.tolist() == [0, 1, 0, 0, 1, 2]
    assert found.lengths == [2, 1, 3]
    assert found.predicted == 6 and found.learned_T is None
    assert found.ids_T.dtype == found.labels_T.dtype == found.positions_T.dtype == torch.int64


def test_rows_filled_to_a_width() -> None:
    found = tokens_of([row(2, 1), row(5)], width=5)
    assert found.ids_T.tolist() == [1, 2, 3, 0, 0, 1, 2, 3, 4, 5]
    assert found.labels_T.tolist() == [2, 3, 4, -100, -100, 2, 3, 4, 5, 6]
    assert found.positions_T.tolist() == [0, 1, 0, 0, 1, 0, 1, 2, 3, 4]
    assert found.lengths == [2, 1, 2, 5]
    assert found.predicted == 8


def test_no_row_is_no_token() -> None:
    found = tokens_of([])
    assert found.ids_T.shape == (0,)
    assert (found.lengths, found.predicted) == ([], 0)


def test_a_row_wider_than_the_width_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="3 tokens is wider than 2"):
        tokens_of([row(3)], width=2)


def test_a_copy_is_not_asked_what_the_host_knows() -> None:
    """The device of the copy, "meta", has no numbers at all."""
    held = tokens_of([row(2, 1), row(3)], width=4)
    learned_T, there = held.learned_T, held.to(torch.device("meta"))
    assert learned_T is not None and learned_T.tolist() == [0, 1, 2, 4, 5, 6]
    assert there.predicted == held.predicted == 6
    assert there.learned_T is not None and there.learned_T.shape == (6,)
