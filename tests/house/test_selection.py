"""What `make test` keeps of a table of cases, and that `make soak` has all the rest."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.properties import examples
from tests.support.selection import REST, SOME, covering, in_turn, pairs_in_turn, soak_but


def split(cases: list[Any]) -> tuple[list[Any], list[Any]]:
    """The cases of `make test`, and those of `make soak`."""
    soaked = [case.values for case in cases if hasattr(case, "marks")]
    assert all(case.marks[0].name == "soak" for case in cases if hasattr(case, "marks"))
    return [case for case in cases if not hasattr(case, "marks")], soaked


AXES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(
    lambda sizes: [[f"{axis}{place}" for place in range(size)] for axis, size in zip("abc", sizes, strict=False)]
)


@settings(max_examples=examples(30))
@given(AXES, st.integers(1, 3))
def test_values_of_different_axes_meet_and_no_combination_is_lost(axes: list[list[str]], together: int) -> None:
    kept, soaked = split(covering(*axes, together=together))
    assert sorted([*kept, *soaked]) == sorted(itertools.product(*axes))
    for chosen in itertools.combinations(axes, min(together, len(axes))):
        for values in itertools.product(*chosen):
            assert any(set(values) <= set(case) for case in kept), values
    assert split(covering(*axes, together=together)) == (kept, soaked), "it is the same each time"


def test_no_more_is_kept_than_covering_takes() -> None:
    three = [["a", "b", "c", "d"], [1, 2, 3], [True, False]]
    assert len(split(covering(*three))[0]) == 4
    assert len(split(covering(*three, together=2))[0]) == 12
    assert len(split(covering(*three, together=3))[0]) == 24
    spread = split(covering(range(8), range(2)))[0]
    assert [sum(second == value for _, second in spread) for value in range(2)] == [4, 4], (
        "not one value again and again"
    )


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_every_case_has_its_turns(cases: int, layouts: int, count: int) -> None:
    names, cuts = [f"family {i}" for i in range(cases)], list(range(layouts))
    for name in names:
        some, rest = (in_turn(cuts, name, names, part, count) for part in (SOME, REST))
        assert sorted(some + rest) == cuts and len(some) == min(count, layouts)
    kept, soaked = split(pairs_in_turn(names, cuts, count))
    assert sorted([*kept, *soaked]) == sorted(itertools.product(names, cuts))
    assert {name for name, _ in kept} == set(names)
    if cases * count >= layouts:
        assert {cut for _, cut in kept} == set(cuts)


def test_what_is_to_be_kept_must_be_there() -> None:
    assert split(soak_but(["b"], ["a", "b"])) == (["b"], [("a",)])
    with pytest.raises(AssertionError, match="are to be kept of"):
        soak_but(["c"], ["a", "b"])
