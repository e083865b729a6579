"""The ledger under kills: whatever stopped, with however many ranks it went on, each row is learned once an epoch."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.properties import examples
from tllm.core.errors import ConfigError
from tllm.training.data.data_position import RowLedger
from tllm.training.data.packing import Packed, Packer, RowPiece, deal
from tllm.training.data.row_order import order_of

SEQ_LEN = 12


def ledger_of(lengths: list[int], shuffle: bool, open_rows: int, epochs: int | None) -> RowLedger:
    end = None if epochs is None else epochs * len(lengths)
    order = order_of([len(lengths)], None, 3, shuffle)
    return RowLedger(order, lengths.__getitem__, Packer(SEQ_LEN, open_rows), end)


def all_of(ledger: RowLedger) -> list[Packed]:
    rows: list[Packed] = []
    while taken := ledger.take(5):
        rows += taken
    return rows


@settings(max_examples=examples(200))
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any),
    shuffle=st.booleans(),
    open_rows=st.integers(0, 5),
    epochs=st.integers(1, 3),
    chance=st.randoms(use_true_random=False),
)
def test_kills_at_any_moment_with_any_ranks(
    lengths: list[int], shuffle: bool, open_rows: int, epochs: int, chance: random.Random
) -> None:
    """Each life restores the last save, has its own ranks, shares and batch, and dies after some unsaved steps."""
    learned: list[RowPiece] = []  # what the weights of the last save have seen
    saved: str | None = None
    done = False
    while not done:
        ledger = ledger_of(lengths, shuffle, open_rows, epochs)
        if saved is not None:
            ledger.restore(json.loads(saved))
        shares = [chance.randint(1, 4) for _ in range(chance.randint(1, 6))]
        batch, since = chance.randint(1, 7), list[RowPiece]()
        for _ in range(chance.randint(1, 8)):
            rows = ledger.take(batch)
            done = not rows
            since += [piece for part in deal(len(rows), shares) for place in part for piece in rows[place]]
            if chance.random() < 0.4 or done:
                saved, learned, since = json.dumps(ledger.state()), learned + since, []
    wanted = {(row, token): epochs for row, length in enumerate(lengths) for token in range(length)}
    assert Counter((piece.row, token) for piece in learned for token in range(piece.start, piece.stop)) == wanted


@given(st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any), st.integers(0, 200), st.integers(0, 5))
def test_a_stop_changes_no_row(lengths: list[int], stop: int, open_rows: int) -> None:
    quiet = all_of(ledger_of(lengths, True, open_rows, 2))
    first = ledger_of(lengths, True, open_rows, 2)
    before = first.take(stop)
    second = ledger_of(lengths, True, open_rows, 2)
    second.restore(json.loads(json.dumps(first.state())))
    assert before + all_of(second) == quiet


@given(st.integers(1, 30))
def test_what_was_read_is_learned_or_waits(steps: int) -> None:
    lengths = [1 + 7 * i % 31 for i in range(50)]
    ledger = ledger_of(lengths, True, 4, None)
    pieces = [piece for row in ledger.take(steps) for piece in row] + ledger.waiting()
    order = order_of([50], None, 3, True)
    state = ledger.state()
    read = [order.row(i) for i in range(state["position"])]
    wanted = Counter({row: count * lengths[row] for row, count in Counter(read).items()})
    if state["inside"]:
        wanted[order.row(state["position"])] += state["inside"]
    found: Counter[int] = Counter()
    for piece in pieces:
        found[piece.row] += piece.length
    assert found == wanted


def test_unpacked_rows_keep_the_order_of_the_file() -> None:
    ledger = ledger_of([3, 5, 30, 2], False, 0, None)
    rows = ledger.take(8)
    assert [piece for (piece,) in rows] == [
        RowPiece(0, 0, 3),
        RowPiece(1, 0, 5),
        RowPiece(2, 0, 12),
        RowPiece(2, 12, 24),
        RowPiece(2, 24, 30),
        RowPiece(3, 0, 2),
        RowPiece(0, 0, 3),
        RowPiece(1, 0, 5),
    ]
    assert ledger.epoch == 1


def test_data_without_a_token_end_the_run() -> None:
    with pytest.raises(ConfigError, match="no token"):
        ledger_of([0, 0], False, 0, None).take(1)


@pytest.mark.parametrize("state", [{}, {"position": "x"}, {"position": 1, "open": [[1]]}, {"rank": 3}])
def test_a_state_that_is_none(state: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="position"):
        ledger_of([1], False, 0, None).restore(state)
