"""Which grid so many ranks form, and who stands where on it."""

from __future__ import annotations

import pytest

from tllm.core.errors import PlanError
from tllm.spec.grid.grid_shape import GridShape, TensorMode, grid_shape


@pytest.mark.parametrize(
    ("mode", "ranks", "sides"),
    [
        ("2d", 4, "2x2"),
        ("2d", 9, "3x3"),
        ("2d", 16, "4x4"),
        ("2.5d", 8, "2x2x2"),
        ("2.5d", 12, "2x2x3"),
        ("2.5d", 16, "2x2x4"),
        ("2.5d", 18, "3x3x2"),
        ("2.5d", 32, "4x4x2"),
        ("3d", 8, "2x2x2"),
        ("3d", 27, "3x3x3"),
        ("3d", 64, "4x4x4"),
    ],
)
def test_ranks_form_the_grid_of_their_mode(mode: TensorMode, ranks: int, sides: str) -> None:
    shape = grid_shape(mode, ranks)
    assert shape is not None and str(shape) == sides and shape.ranks == ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_in_one_dimension_there_is_no_grid(ranks: int) -> None:
    assert grid_shape("1d", ranks) is None


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [("2d", 1), ("2d", 2), ("2d", 8), ("2.5d", 1), ("2.5d", 4), ("2.5d", 9), ("3d", 1), ("3d", 4), ("3d", 9)],
)
def test_ranks_that_form_no_grid_are_refused_with_numbers_that_would(mode: TensorMode, ranks: int) -> None:
    with pytest.raises(PlanError, match=f"tensor={mode} needs tp to be a .*, and tp is {ranks}") as refused:
        grid_shape(mode, ranks)
    assert "for example tp of" in (refused.value.hint or "")


@pytest.mark.parametrize("shape", [GridShape("2d", 3), GridShape("2.5d", 2, 3), GridShape("3d", 3, 3)], ids=str)
def test_every_block_of_tokens_is_on_as_many_ranks(shape: GridShape) -> None:
    places = [shape.place(rank) for rank in range(shape.ranks)]
    assert [shape.rank_at(*place) for place in places] == list(range(shape.ranks))
    for block_of in (shape.outer_block, shape.inner_block):
        held = [block_of(place) for place in places]
        assert sorted(held) == sorted([*range(shape.token_blocks)] * shape.side)
