"""The grid that the ranks of a stage form for 2D, 2.5D and 3D tensor parallelism, and each rank's place on it.

1d      no grid: Megatron-LM (1909.08053), where each weight is cut along one of its sides
2d      q x q ranks, the products by SUMMA: "An Efficient 2D Method for Training Super-Large Deep Learning Models"
        (2104.05343)
2.5d    q x q x d ranks, d such layers that divide the tokens and each have all weights: "2.5-dimensional
        distributed model training" (2105.14500)
3d      q x q x q ranks: "Maximizing Parallelism in Distributed Training for Huge Neural Networks" (2105.14450)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Literal, NamedTuple

from tllm.core.errors import PlanError

TensorMode = Literal["1d", "2d", "2.5d", "3d"]
GridMode = Literal["2d", "2.5d", "3d"]
MODES: tuple[TensorMode, ...] = ("1d", "2d", "2.5d", "3d")


class GridPlace(NamedTuple):
    """A rank's coordinates. Ranks are numbered layer by layer, inside a layer row by row."""

    layer: int
    row: int
    column: int


@dataclass(frozen=True)
class GridShape:
    """`side` x `side` ranks in each of `depth` layers."""

    mode: GridMode
    side: int
    depth: int = 1

    @property
    def ranks(self) -> int:
        return self.side * self.side * self.depth

    @property
    def token_blocks(self) -> int:
        """Into how many blocks a microbatch is cut."""
        return self.side * self.depth

    def place(self, rank: int) -> GridPlace:
        layer, within = divmod(rank, self.side * self.side)
        return GridPlace(layer, *divmod(within, self.side))

    def rank_at(self, layer: int, row: int, column: int) -> int:
        return (layer * self.side + row) * self.side + column

    def outer_block(self, at: GridPlace) -> int:
        """The block of tokens whose hidden states a rank has where a layer adds to them."""
        return at.row * self.side + at.column if self.mode == "3d" else at.layer * self.side + at.row

    def inner_block(self, at: GridPlace) -> int:
        """The block of tokens for which it attends, computes an MLP's width, and has logits and labels."""
        return at.row * self.side + at.layer if self.mode == "3d" else self.outer_block(at)

    @property
    def width_parts(self) -> int:
        """Into how many parts weights cut the width of hidden states."""
        return self.side * self.side if self.mode == "3d" else self.side

    def __str__(self) -> str:
        sides = f"{self.side}x{self.side}"
        return sides if self.mode == "2d" else f"{sides}x{self.depth}"


def grid_shape(mode: TensorMode, ranks: int) -> GridShape | None:
    """The grid of so many ranks; None for 1d. Raises PlanError where they form none.

    That of 2.5d has the longest side that leaves two layers or more.

    >>> str(grid_shape("2.5d", 8))
    '2x2x2'
    """
    if mode == "1d":
        return None
    depths = {"2d": [1], "2.5d": range(2, ranks), "3d": [round(ranks ** (1 / 3))]}[mode]
    for depth in depths:
        side = isqrt(ranks // depth)
        if side > 1 and side * side * depth == ranks and (mode != "3d" or side == depth):
            return GridShape(mode, side, depth)
    form, some = {
        "2d": ("square", "4, 9 or 16"),
        "2.5d": ("square times a depth of 2 or more", "8, 12, 16 or 18"),
        "3d": ("cube", "8 or 27"),
    }[mode]
    raise PlanError(f"tensor={mode} needs tp to be a {form}, and tp is {ranks}", f"for example tp of {some}")
