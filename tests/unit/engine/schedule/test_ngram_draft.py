"""What is drafted is what followed the most alike place, as a search through the whole text finds it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm.engine.schedule.ngram_draft import (
    INITIAL_ACCEPTANCE_RATE,
    MAX_CANDIDATES,
    MAX_MATCH,
    DraftOutcome,
    NGramProposer,
    num_accepted_tokens,
)


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
    draft = NGramProposer(text)
    for at in range(0, len(ids), step):
        text += ids[at : at + step]
        assert draft.propose(count) == (proposed_slowly(text, count) if len(text) > 1 else [])


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    assert NGramProposer([1, 2, 3, 1, 2, 3, 1, 2]).propose(7) == [3, 1, 2, 3, 1, 2, 3]
    assert NGramProposer([5, 5, 5]).propose(4) == [5, 5, 5, 5]
    assert NGramProposer([1, 2, 3, 4]).propose(4) == []


def test_of_two_places_the_one_with_more_before_it_counts() -> None:
    assert NGramProposer([7, 1, 2, 8, 9, 1, 2, 6, 7, 1, 2]).propose(1) == [8], (
        "after 7 1 2 came 8, though 1 2 6 is nearer"
    )
    assert NGramProposer([1, 2, 8, 9, 1, 2, 6, 3, 1, 2]).propose(1) == [6], "of equals the nearest"


def test_the_rate_follows_what_was_right() -> None:
    draft = NGramProposer([1, 2, 3, 1, 2])
    assert draft.record_acceptance([3]) == DraftOutcome(0, 0), "nothing was proposed"
    draft.propose(3)
    assert draft.record_acceptance([3, 1, 9]) == DraftOutcome(2, 1)
    assert draft.acceptance_rate == pytest.approx((1 - (1 - INITIAL_ACCEPTANCE_RATE) * 0.9**2) * 0.9)
    draft.propose(3)
    before = draft.acceptance_rate
    assert draft.record_acceptance([3]) == DraftOutcome(1, 0), "what was not computed is neither right nor wrong"
    assert draft.acceptance_rate > before
    draft = NGramProposer([1, 2, 3])
    draft.propose(3)
    assert draft.record_acceptance([9]) == DraftOutcome(0, 1) and draft.acceptance_rate == INITIAL_ACCEPTANCE_RATE, (
        "what is not proposed does not come, nor is it wrong"
    )
