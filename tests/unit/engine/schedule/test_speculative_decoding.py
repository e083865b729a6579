"""How many tokens are checked is what gives the most tokens a second, by what steps have taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.kits import request
from tllm.engine.schedule.sequence import Sequence
from tllm.engine.schedule.speculative_decoding import RETRY_EVERY, Speculation
from tllm.engine.schedule.step_cost import FIRST_ROUND, INITIAL_ROW_SHARE, StepCost


def sequence(key: int = 0, tokens: int = 40, max_tokens: int = 30, **params: object) -> Sequence:
    """One that repeats 1 2 3."""
    return Sequence(key, request(f"r{key}", [1, 2, 3] * (tokens // 3), max_tokens, **params))


def cost_of(first: float, row: float) -> StepCost:
    cost = StepCost()
    for rows in (1, 3, 5):
        cost.record(rows, first + row * rows, rows > 1)
    return cost


def test_a_line_goes_through_what_steps_took() -> None:
    cost = StepCost()
    cost.record(1, 2.0, False)
    assert cost.row_seconds == pytest.approx(
        2 * INITIAL_ROW_SHARE
    ) and cost.base_seconds + cost.row_seconds == pytest.approx(2.0)
    cost = cost_of(0.3, 0.05)
    assert (cost.base_seconds, cost.row_seconds) == (pytest.approx(0.3), pytest.approx(0.05))
    for _ in range(60):
        cost.record(1, 0.1, False)
        cost.record(5, 1.35, True)
        cost.record(3, 0.85, True)
    assert cost.row_seconds == pytest.approx(0.25, rel=1e-3), "what a row takes now counts"
    for rows in range(100, 140):
        cost.record(rows, 1.0 + 0.01 * rows, True)
    assert (cost.base_seconds, cost.row_seconds) == (pytest.approx(1.0), pytest.approx(0.01)), (
        "what was long ago is forgotten"
    )
    falling = StepCost()
    falling.record(1, 2.0, True)
    falling.record(9, 1.0, True)
    assert falling.row_seconds == 0.0 and falling.row_pays(0.01, 5, 5.0), "noise is no gain of its own"


@given(st.floats(0.05, 0.99), st.floats(0.0, 5.0), st.floats(0.01, 1.0), st.integers(0, 12))
def test_so_many_are_checked_as_give_the_most_tokens_a_second(
    chance: float, first: float, row: float, most: int
) -> None:
    speculation, one = Speculation(most), sequence()
    speculation.cost = cost_of(first, row)
    speculation.propose([one], 100)
    speculation.ngram_rates[0] = chance

    def rate(count: int) -> float:
        return sum(chance**i for i in range(count + 1)) / (first + row * (1 + count))

    (draft,) = speculation.propose([one], 100)
    assert rate(len(draft)) == pytest.approx(max(map(rate, range(most + 1))), rel=1e-9)


def test_what_a_row_costs_decides() -> None:
    far, near = Speculation(8), Speculation(8)
    far.cost, near.cost = cost_of(0.1, 0.001), cost_of(0.0, 0.01)
    assert [len(speculation.propose([sequence()], 100)[0]) for speculation in (far, near)] == [5, 0]


def test_where_the_first_row_beside_costs_much_drafts_end_and_are_tried_again() -> None:
    speculation, one = Speculation(8), sequence()
    for rows, seconds in ((1, 0.004), (2, 0.010), (3, 0.0101), (5, 0.0103)):
        speculation.cost.record(rows, seconds, rows > 1)
    drafted = []
    for _ in range(2 * RETRY_EVERY):
        (draft,) = speculation.propose([one], 100)
        drafted.append(len(draft))
        speculation.ngram_rates[0] = 0.3
    assert [count > 0 for count in drafted[1:]].count(True) == 2, "two tries of 32"
    speculation.ngram_rates[0] = 0.9
    assert len(speculation.propose([one], 100)[0]) == 8, "five tokens in 10 ms are more than one in 4"


@pytest.mark.parametrize("has_drafts", [True, False])
def test_after_a_step_that_something_held_up_the_cost_of_a_row_is_measured_anew(has_drafts: bool) -> None:
    """By a step of ten seconds a row seems to take seconds, and no step of as many rows comes again to deny it."""
    speculation, one = Speculation(8), sequence()
    speculation.cost = cost_of(0.1, 0.001) if has_drafts else StepCost()
    speculation.cost.record(1, 0.101, False)
    speculation.cost.record(5, 10.0, has_drafts)
    drafted = []
    for _ in range(4 * FIRST_ROUND):
        (draft,) = speculation.propose([one], 100)
        drafted.append(len(draft))
        speculation.cost.record(1 + len(draft), 0.1 + 0.001 * (1 + len(draft)), len(draft) > 0)
    assert drafted[0] == 0 and min(drafted[FIRST_ROUND:]) > 0


def test_where_a_row_costs_as_much_as_a_step_that_is_measured_ever_less_often() -> None:
    speculation, one, steps = Speculation(8), sequence(), 1600
    tries = 0
    for _ in range(steps):
        (draft,) = speculation.propose([one], 100)
        tries += len(draft) > 0
        speculation.cost.record(1 + len(draft), 0.1 * (1 + len(draft)), len(draft) > 0)
        speculation.ngram_rates[0] = 0.3
    assert 4 < tries < steps / 50


def test_batches_are_not_filled_beyond_their_room() -> None:
    speculation = Speculation(8)
    speculation.cost = cost_of(1.0, 0.0)
    draft = speculation.propose([sequence(key) for key in range(3)], 10)
    assert sum(map(len, draft)) == 7
    assert [len(one) for one in speculation.propose([sequence(key) for key in range(3)], 3)] == [0, 0, 0]


def test_no_more_is_drafted_than_may_come() -> None:
    assert sequence(max_tokens=1).max_draft_tokens == 0
    assert sequence(max_tokens=5).max_draft_tokens == 4
    assert sequence(max_tokens=30, min_tokens=4).max_draft_tokens == 3, "an end may come after four, and not before"
    one = sequence(max_tokens=30, min_tokens=4)
    one.token_ids += [1, 2, 3, 1]
    assert one.max_draft_tokens == 25


def test_a_reply_begins_with_the_rate_that_those_before_it_ended_with() -> None:
    speculation = Speculation(8)
    for key in range(20):
        one = sequence(key)
        (draft,) = speculation.propose([one], 100)
        speculation.record_acceptance(one.key, len(draft), [1, 2, 3, 1, 2, 3, 1, 2])
        speculation.forget(one.key)
    assert speculation.ngram_rates.initial > 0.9
    assert speculation.ngram_rates[20] == speculation.ngram_rates.initial


def test_counts() -> None:
    speculation, one, new = Speculation(8), sequence(), sequence(1, tokens=3)
    speculation.record_acceptance(one.key, 0, [1])
    assert sum(speculation.stats().values()) == 0, "a first token is not drafted"
    (draft, nothing) = speculation.propose([one, new], 100)
    assert draft[:3] == [1, 2, 3] and nothing == []
    speculation.record_acceptance(one.key, len(draft), [1, 2, 9])
    speculation.record_acceptance(new.key, 0, [4])
    assert speculation.stats() == {
        "drafts": 1,
        "draft_tokens": len(draft),
        "accepted_tokens": 2,
        "draft_right": 2,
        "draft_wrong": 2,
    }
    speculation.forget(one.key)
    speculation.forget(one.key)
    assert list(speculation.ngram_rates._rates) == [1]
