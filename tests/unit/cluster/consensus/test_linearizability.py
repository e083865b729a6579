"""The checker of histories is itself checked, against all orders of short ones."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from tests.support.consensus.linearizability import Operation, is_linearizable


def write(value: bytes, start: float, end: float = math.inf) -> Operation:
    return Operation(True, value, start, end)


def read(value: bytes, start: float, end: float) -> Operation:
    return Operation(False, value, start, end)


@pytest.mark.parametrize(
    ("history", "holds"),
    [
        ([write(b"a", 0, 1), read(b"a", 2, 3)], True),
        ([write(b"a", 0, 1), read(b"", 2, 3)], False),
        ([write(b"a", 0, 4), read(b"a", 1, 2), read(b"", 3, 4)], False),
        ([write(b"a", 0, 4), read(b"", 1, 2), read(b"a", 3, 4)], True),
        ([write(b"a", 0), read(b"", 9, 10)], True),
        ([write(b"a", 0), read(b"a", 9, 10), read(b"", 11, 12)], False),
        ([write(b"a", 0, 1), write(b"b", 2, 3), read(b"a", 4, 5)], False),
        ([write(b"a", 0, 3), write(b"b", 2, 3), read(b"a", 4, 5)], True),
    ],
)
def test_histories_that_are_clear(history: list[Operation], holds: bool) -> None:
    assert is_linearizable(history) == holds


def test_it_says_what_trying_every_order_says() -> None:
    dice = random.Random(1)
    answers = set()
    for _ in range(400):
        history = [_drawn(dice, number) for number in range(5)]
        answers.add(expected := _by_all_orders(history))
        assert is_linearizable(history) == expected, history
    assert answers == {True, False}


def _drawn(dice: random.Random, number: int) -> Operation:
    start = dice.randrange(8)
    end = start + dice.randrange(1, 6)
    if dice.random() < 0.5:
        return write(f"{number}".encode(), start, math.inf if dice.random() < 0.3 else end)
    return read(dice.choice((b"", b"0", b"1", b"2", b"3")), start, end)


def _by_all_orders(history: list[Operation]) -> bool:
    unsure = [operation for operation in history if operation.end == math.inf]
    sure = [operation for operation in history if operation.end < math.inf]
    subsets = itertools.chain.from_iterable(itertools.combinations(unsure, n) for n in range(len(unsure) + 1))
    return any(_explains(order) for some in subsets for order in itertools.permutations([*sure, *some]))


def _explains(order: tuple[Operation, ...]) -> bool:
    if any(later.end < earlier.start for earlier, later in itertools.combinations(order, 2)):
        return False
    value = b""
    for operation in order:
        if operation.is_write:
            value = operation.value
        elif operation.value != value:
            return False
    return True
