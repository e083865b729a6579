"""The curve falls where the values fall, within its frame."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tllm.cli.display.curve import BRAILLE, curve


def heights(lines: list[str]) -> list[int]:
    """The row of the first dot in each column of characters."""
    cells = [line[8:] for line in lines]
    return [next((row for row, line in enumerate(cells) if ord(line[i]) != BRAILLE), -1) for i in range(len(cells[0]))]


def test_a_falling_loss_falls() -> None:
    lines = curve([8 - 0.05 * step for step in range(100)], width=20, height=5)
    assert len(lines) == 5 and {len(line) for line in lines} == {28}
    assert heights(lines) == sorted(heights(lines)) and heights(lines)[0] == 0 and heights(lines)[-1] == 4
    assert lines[0].startswith("  8.0") or lines[0].startswith("  7.9")
    assert lines[-1].lstrip().startswith("3.")


def test_what_is_still_to_come_is_blank() -> None:
    lines = curve([3.0, 2.0], width=20, height=5, steps=100)
    assert heights(lines)[0] == 0 and set(heights(lines)[1:]) == {-1}


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=300), st.integers(2, 60))
def test_any_values_keep_the_frame(values: list[float], width: int) -> None:
    lines = curve(values, width, 6)
    assert len(lines) == 6
    if any(math.isfinite(value) for value in values):
        assert {len(line) for line in lines} == {width + 8} or max(map(len, lines)) > width + 8
