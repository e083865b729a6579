"""What is drafted is what followed the most alike place, as a search through the whole text finds it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.kits import request
from tllm.engine.schedule.ngram_draft import MAX_CANDIDATES, MAX_MATCH, NGramIndex, NGramProposer
from tllm.engine.schedule.proposer import (
    INITIAL_ACCEPTANCE_RATE,
    AcceptanceRates,
    DraftOutcome,
    num_accepted_tokens,
)
from tllm.engine.schedule.sequence import Sequence


def proposed_slowly(ids: list[int], count: int) -> list[int]:
    """The nearest of the most alike earlier places of the last two tokens, and what follows it."""
    end = len(ids) - 1
    places = [at for at in range(end - 1, 0, -1) if ids[at - 1 : at + 1] == ids[end - 1 :]][:MAX_CANDIDATES]
    if not places:
        return []

    def alike(at: int) -> int:
        return num_accepted_tokens(ids[at::-1], ids[end::-1][: min(at + 1, MAX_MATCH)])

    best = max(places, key=lambda at: (alike(at), at))
    text = list(ids)
    for at in range(best + 1, best + 1 + count):
        text.append(text[at])
    return text[len(ids) :]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 5))
def test_what_is_proposed_while_a_text_grows_is_what_a_search_finds(ids: list[int], count: int, step: int) -> None:
    text: list[int] = []
    draft = NGramIndex(text)
    for at in range(0, len(ids), step):
        text += ids[at : at + step]
        assert draft.propose(count) == (proposed_slowly(text, count) if len(text) > 1 else [])


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    assert NGramIndex([1, 2, 3, 1, 2, 3, 1, 2]).propose(7) == [3, 1, 2, 3, 1, 2, 3]
    assert NGramIndex([5, 5, 5]).propose(4) == [5, 5, 5, 5]
    assert NGramIndex([1, 2, 3, 4]).propose(4) == []


def test_of_two_places_the_one_with_more_before_it_counts() -> None:
    assert NGramIndex([7, 1, 2, 8, 9, 1, 2, 6, 7, 1, 2]).propose(1) == [8], "after 7 1 2 came 8, though 1 2 6 is nearer"
    assert NGramIndex([1, 2, 8, 9, 1, 2, 6, 3, 1, 2]).propose(1) == [6], "of equals the nearest"


def test_the_rate_follows_what_was_right() -> None:
    rates = AcceptanceRates()
    assert rates.record(0, [3, 1, 2], [3, 1, 9]) == DraftOutcome(2, 1)
    assert rates[0] == pytest.approx((1 - (1 - INITIAL_ACCEPTANCE_RATE) * 0.9**2) * 0.9)
    before = rates[0]
    assert rates.record(0, [3, 1, 2], [3]) == DraftOutcome(1, 0), "what was not computed is neither right nor wrong"
    assert rates[0] > before
    assert rates.record(1, [], [9]) == DraftOutcome(0, 1) and rates[1] == INITIAL_ACCEPTANCE_RATE, (
        "what is not proposed does not come, nor is it wrong"
    )


def test_each_sequence_is_looked_up_in_its_own_text() -> None:
    proposer = NGramProposer()
    one, other = (Sequence(key, request(f"r{key}", ids, 9)) for key, ids in enumerate(([1, 2, 3, 1, 2], [4, 5, 6])))
    assert proposer.propose([one, other], [2, 2]) == [[3, 1], []]
    assert (proposer.match(0), proposer.match(1)) == (2, 0)
    other.token_ids += [4, 5]
    proposer.release(0)
    assert proposer.propose([other, one], [1, 1]) == [[6], [3]]
