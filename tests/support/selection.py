"""Which cases of a large table `make test` runs: some that cover every value, and with `make soak` all the rest.

A fault is nearly always in a part (which a family has), in a cut (which a layout has) or where two of them meet, seldom
in one combination of three. So no value of any axis is left to `make soak` alone (of families those that have a part or
an order of parts of their own: `UNLIKE` in models/families.py), and where two axes may interact (ZeRO and the order of
a pipeline, say) each pair of their values meets in `make test`, too. What is chosen follows from the places of the
values in their lists, so it is the same on every machine and in every process.

| a test of | is written with |
|---|---|
| families, each with the layouts whose turn it is inside the test | `EACH_PART`, `in_turn` |
| the same with a test for each pair | `pairs_in_turn` |
| a product of axes | `covering` |
| cases that somebody has chosen | `soak_but` |
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
Combination = tuple[int, ...]
"""The place of the value on each axis."""

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


def covering(*axes: Iterable[Any], together: int = 1) -> list[Any]:
    """Every combination of one value from each axis as a test of its own, of which `make test` runs a few that cover.

    Each value of each axis is among them, and with `together` 2 each two values of different axes are in one of them
    (3 of three axes, and so on).
    """
    lists = [list(axis) for axis in axes]
    kept = set(_cover([len(values) for values in lists], together))
    return [
        (combination if places in kept else _soaked(combination))
        for places, combination in zip(
            itertools.product(*(range(len(values)) for values in lists)), itertools.product(*lists), strict=True
        )
    ]


def soak_but(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """The values of a parameter, of which those not in `kept` are left to `make soak`."""
    chosen, known = list(kept), list(values)
    assert all(value in known for value in chosen), f"{chosen} are to be kept of {known}"
    return [value if value in chosen else _soaked(value) for value in known]


def _cover(sizes: Sequence[int], together: int) -> list[Combination]:
    """Greedily, the combination with the most that is new; of several the one whose values have been used the least."""
    left = {met for combination in itertools.product(*map(range, sizes)) for met in _meetings(combination, together)}
    used: Counter[tuple[int, int]] = Counter()
    kept: list[Combination] = []

    def worth(combination: Combination) -> tuple[int, int]:
        new = sum(met in left for met in _meetings(combination, together))
        return new, -sum(used[place] for place in enumerate(combination))

    while left:
        best = max(itertools.product(*map(range, sizes)), key=worth)
        kept.append(best)
        left.difference_update(_meetings(best, together))
        used.update(enumerate(best))
    return kept


def _meetings(combination: Combination, together: int) -> Iterable[tuple[tuple[int, int], ...]]:
    """Every `together` values of a combination, each as (axis, place on it)."""
    return itertools.combinations(enumerate(combination), min(together, len(combination)))


def _soaked(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.soak)
