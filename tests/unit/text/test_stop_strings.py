"""Stop strings in pieces against the slow answer over the whole text."""

from __future__ import annotations

import random

import pytest

from tllm.text.stop_strings import StopFinder


def whole_text_answer(text: str, stops: list[str], include: bool, early: int) -> tuple[str, str | None]:
    """Grow the text character by character; cut at the first stop that is complete, the longest of those.

    The first `early` characters end none.
    """
    for end in range(early + 1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("seed", range(8))
def test_pieces_give_the_answer_of_the_whole_text(seed: int) -> None:
    rng = random.Random(seed)
    found = 0
    for _ in range(600):
        text = "".join(rng.choices("abAé\n", k=rng.randint(0, 24)))
        stops = ["".join(rng.choices("abAé\n", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 4))]
        include = rng.random() < 0.3
        early = rng.choice([0, 0, rng.randint(0, len(text))])
        expected, stop = whole_text_answer(text, stops, include, early)
        finder = StopFinder(stops, include)
        given, place = "", 0
        while place < len(text) and finder.found is None:
            step = rng.randint(0, 4)
            step = min(step, early - place) if place < early else step
            given += finder.push(text[place : place + step], place < early)
            place += step
            assert expected.startswith(given), "text was given out that a stop string then took back"
        if finder.found is None:
            given += finder.finish()
        assert (given, finder.found) == (expected, stop)
        found += stop is not None
    assert 100 < found < 600


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    finder = StopFinder(["\n\nQ:"])
    assert finder.push("one\n") == "one"
    assert finder.push("two\n\n") == "\ntwo"
    assert finder.push("Q") == ""
    assert finder.push("uit") == "\n\nQuit"
    assert finder.push("\n\nQ: no") == ""
    assert finder.found == "\n\nQ:"
    assert finder.push("more") == ""
    assert finder.finish() == ""


def test_without_stops_text_passes_through() -> None:
    finder = StopFinder([])
    assert finder.push("abc") == "abc"
    assert finder.finish() == ""


def test_an_empty_stop_string_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        StopFinder([""])
