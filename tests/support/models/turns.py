"""Tables of many families and many layouts: some of each in turn with `make test`, and all the rest with `make soak`.

Every family has layouts in `make test`, and every layout families; which ones meet there follows from their places in
the two lists. What they meet in is where a family is special (its parts) or a layout is (its cuts), seldom both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

SOME, REST = "some", "rest"
EACH_PART = pytest.mark.parametrize("part", [SOME, pytest.param(REST, marks=pytest.mark.soak)])
"""A test that is run twice: for the layouts whose turn it is, and for the others."""


def in_turn(layouts: Sequence[T], case: str, cases: Iterable[str], part: str, count: int = 2) -> list[T]:
    """The `count` layouts whose turn it is for this one of the cases, or with `part` REST the others."""
    first = count * list(cases).index(case)
    turns = {(first + i) % len(layouts) for i in range(count)}
    return [layout for place, layout in enumerate(layouts) if (place in turns) == (part == SOME)]


def pairs_in_turn(cases: Iterable[str], layouts: Sequence[Any], count: int = 2) -> list[Any]:
    """Every (case, layout) as a test of its own, of which those whose turn it is not are left to `make soak`."""
    known = list(cases)
    return [
        (case, layout) if layout in in_turn(layouts, case, known, SOME, count) else _soaked((case, layout))
        for case in known
        for layout in layouts
    ]


def soak_but(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """The values of a parameter, of which those not in `kept` are left to `make soak`."""
    chosen = list(kept)
    return [value if value in chosen else _soaked(value) for value in values]


def _soaked(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.soak)
