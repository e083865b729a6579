"""How many tokens are checked is what gives the most tokens a second, by what turns have taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.kits import request
from tllm.engine.schedule.sequence import Sequence
from tllm.engine.schedule.speculation import AGAIN, ROW_SHARE, Speculation, TurnCost, most_of


def sequence(key: int = 0, tokens: int = 40, max_tokens: int = 30, **params: object) -> Sequence:
    """One that repeats 1 2 3."""
    return Sequence(key, request(f"r{key}", [1, 2, 3] * (tokens // 3), max_tokens, **params))


def cost_of(first: float, row: float) -> TurnCost:
    cost = TurnCost()
    for rows in (1, 3, 5):
        cost.took(rows, first + row * rows, rows > 1)
    return cost


def test_a_line_goes_through_what_turns_took() -> None:
    cost = TurnCost()
    cost.took(1, 2.0, False)
    assert cost.row == pytest.approx(2 * ROW_SHARE) and cost.first + cost.row == pytest.approx(2.0)
    cost = cost_of(0.3, 0.05)
    assert (cost.first, cost.row) == (pytest.approx(0.3), pytest.approx(0.05))
    for _ in range(60):
        cost.took(1, 0.1, False)
        cost.took(5, 1.35, True)
        cost.took(3, 0.85, True)
    assert cost.row == pytest.approx(0.25, rel=1e-3), "what a row takes now counts"
    for rows in range(100, 140):
        cost.took(rows, 1.0 + 0.01 * rows, True)
    assert (cost.first, cost.row) == (pytest.approx(1.0), pytest.approx(0.01)), "what was long ago is forgotten"
    falling = TurnCost()
    falling.took(1, 2.0, True)
    falling.took(9, 1.0, True)
    assert falling.row == 0.0 and falling.pays(0.01, 5, 5.0), "noise is no gain of its own"


@given(st.floats(0.05, 0.99), st.floats(0.0, 5.0), st.floats(0.01, 1.0), st.integers(0, 12))
def test_so_many_are_checked_as_give_the_most_tokens_a_second(
    chance: float, first: float, row: float, most: int
) -> None:
    speculation, one = Speculation(most), sequence()
    speculation.cost = cost_of(first, row)
    speculation.choose([one], 100)
    speculation._drafts[0].chance = chance

    def rate(count: int) -> float:
        return sum(chance**i for i in range(count + 1)) / (first + row * (1 + count))

    (told,) = speculation.choose([one], 100)
    assert rate(len(told)) == pytest.approx(max(map(rate, range(most + 1))), rel=1e-9)


def test_what_a_row_costs_decides() -> None:
    far, near = Speculation(8), Speculation(8)
    far.cost, near.cost = cost_of(0.1, 0.001), cost_of(0.0, 0.01)
    assert [len(speculation.choose([sequence()], 100)[0]) for speculation in (far, near)] == [5, 0]


def test_where_the_first_row_beside_costs_much_drafts_end_and_are_tried_again() -> None:
    speculation, one = Speculation(8), sequence()
    for rows, seconds in ((1, 0.004), (2, 0.010), (3, 0.0101), (5, 0.0103)):
        speculation.cost.took(rows, seconds, rows > 1)
    drafted = []
    for _ in range(2 * AGAIN):
        (told,) = speculation.choose([one], 100)
        drafted.append(len(told))
        speculation._drafts[0].chance = 0.3
    assert [count > 0 for count in drafted[1:]].count(True) == 2, "two tries of 32"
    speculation._drafts[0].chance = 0.9
    assert len(speculation.choose([one], 100)[0]) == 8, "five tokens in 10 ms are more than one in 4"


def test_batches_are_not_filled_beyond_their_room() -> None:
    speculation = Speculation(8)
    speculation.cost = cost_of(1.0, 0.0)
    told = speculation.choose([sequence(key) for key in range(3)], 10)
    assert sum(map(len, told)) == 7
    assert [len(one) for one in speculation.choose([sequence(key) for key in range(3)], 3)] == [0, 0, 0]


def test_no_more_is_drafted_than_may_come() -> None:
    assert most_of(sequence(max_tokens=1)) == 0
    assert most_of(sequence(max_tokens=5)) == 4
    assert most_of(sequence(max_tokens=30, min_tokens=4)) == 3, "an end may come after four, and not before"
    one = sequence(max_tokens=30, min_tokens=4)
    one.token_ids += [1, 2, 3, 1]
    assert most_of(one) == 25


def test_a_reply_begins_with_the_chance_that_those_before_it_ended_with() -> None:
    speculation = Speculation(8)
    for key in range(20):
        one = sequence(key)
        (told,) = speculation.choose([one], 100)
        speculation.heard(one, len(told), [1, 2, 3, 1, 2, 3, 1, 2])
        speculation.forget(one)
    assert speculation.chance > 0.9
    new = sequence(20)
    speculation.choose([new], 100)
    assert speculation._drafts[20].chance == speculation.chance


def test_counts() -> None:
    speculation, one, new = Speculation(8), sequence(), sequence(1, tokens=3)
    speculation.heard(one, 0, [1])
    assert sum(speculation.stats().values()) == 0, "a first token is not drafted"
    (told, nothing) = speculation.choose([one, new], 100)
    assert told[:3] == [1, 2, 3] and nothing == []
    speculation.heard(one, len(told), [1, 2, 9])
    speculation.heard(new, 0, [4])
    assert speculation.stats() == {
        "drafts": 1,
        "draft_tokens": len(told),
        "accepted_tokens": 2,
        "draft_right": 2,
        "draft_wrong": 2,
    }
    speculation.forget(one)
    speculation.forget(one)
    assert list(speculation._drafts) == [1]
