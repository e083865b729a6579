"""What is drafted is what followed the most alike place, as a search through the whole text finds it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm.engine.schedule.ngram_draft import COMPARED, PLACES, UNKNOWN, DraftOutcome, NGramProposer, num_accepted


def told_slowly(ids: list[int], count: int) -> list[int]:
    """The nearest of the most alike earlier places of the last two tokens, and what follows it."""
    end = len(ids) - 1
    places = [at for at in range(end - 1, 0, -1) if ids[at - 1 : at + 1] == ids[end - 1 :]][:PLACES]
    if not places:
        return []

    def alike(at: int) -> int:
        return num_accepted(ids[at::-1], ids[end::-1][: min(at + 1, COMPARED)])

    best = max(places, key=lambda at: (alike(at), at))
    text = list(ids)
    for at in range(best + 1, best + 1 + count):
        text.append(text[at])
    return text[len(ids) :]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 5))
def test_what_is_told_while_a_text_grows_is_what_a_search_finds(ids: list[int], count: int, step: int) -> None:
    text: list[int] = []
    draft = NGramProposer(text)
    for at in range(0, len(ids), step):
        text += ids[at : at + step]
        assert draft.tell(count) == (told_slowly(text, count) if len(text) > 1 else [])


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    assert NGramProposer([1, 2, 3, 1, 2, 3, 1, 2]).tell(7) == [3, 1, 2, 3, 1, 2, 3]
    assert NGramProposer([5, 5, 5]).tell(4) == [5, 5, 5, 5]
    assert NGramProposer([1, 2, 3, 4]).tell(4) == []


def test_of_two_places_the_one_with_more_before_it_counts() -> None:
    assert NGramProposer([7, 1, 2, 8, 9, 1, 2, 6, 7, 1, 2]).tell(1) == [8], "after 7 1 2 came 8, though 1 2 6 is nearer"
    assert NGramProposer([1, 2, 8, 9, 1, 2, 6, 3, 1, 2]).tell(1) == [6], "of equals the nearest"


def test_the_chance_follows_what_was_right() -> None:
    draft = NGramProposer([1, 2, 3, 1, 2])
    assert draft.hear([3]) == DraftOutcome(0, 0), "nothing was told"
    draft.tell(3)
    assert draft.hear([3, 1, 9]) == DraftOutcome(2, 1)
    assert draft.chance == pytest.approx((1 - (1 - UNKNOWN) * 0.9**2) * 0.9)
    draft.tell(3)
    before = draft.chance
    assert draft.hear([3]) == DraftOutcome(1, 0), "what was not computed is neither right nor wrong"
    assert draft.chance > before
    draft = NGramProposer([1, 2, 3])
    draft.tell(3)
    assert draft.hear([9]) == DraftOutcome(0, 1) and draft.chance == UNKNOWN, (
        "what is not told does not come, nor is it wrong"
    )
