"""`Grid`: one rank's place among ranks that divide both weights and activations, and the groups that it works in.

Notation, here and beside: rank (l, i, j) of d layers of q x q ranks; D_j is block j of the width of hidden states, F_j
of any other width (heads, MLP, vocabulary).

               hidden states            attention, MLP width,    weight between the widths D and F
                                        logits and labels
    2d, 2.5d   tokens (l, i), D_j       tokens (l, i), F_j       D_i, F_j; alike in each layer l
    3d         tokens (i, j), D_l       tokens (i, l), F_j       part i of D_l, F_j
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tllm.comm.collectives.group import Group, solo
from tllm.spec.cut import Range, proportional
from tllm.spec.grid.grid_shape import GridPlace, GridShape


@dataclass(frozen=True)
class Grid:
    """`stage` are all ranks of the grid. The groups of its axes use the same links, so calls must be in one order."""

    shape: GridShape
    stage: Group

    def __post_init__(self) -> None:
        assert self.stage.size == self.shape.ranks, "the group given is not the grid's"

    @cached_property
    def at(self) -> GridPlace:
        return self.shape.place(self.stage.rank)

    @cached_property
    def row(self) -> Group:
        """The ranks of this row, which have the other parts of heads, MLP width and vocabulary for the same tokens."""
        return self._axis("row", lambda n: self.shape.rank_at(self.at.layer, self.at.row, n), self.shape.side)

    @cached_property
    def column(self) -> Group:
        """The ranks of this column, which have the other parts of D of the same heads or width."""
        return self._axis("column", lambda n: self.shape.rank_at(self.at.layer, n, self.at.column), self.shape.side)

    @cached_property
    def depth(self) -> Group:
        """The ranks at this place of all layers."""
        return self._axis("depth", lambda n: self.shape.rank_at(n, self.at.row, self.at.column), self.shape.depth)

    @cached_property
    def width(self) -> Group:
        """The ranks that have the other parts of D of the same heads, widths and vocabulary, in the order of D."""
        return self.column if self.shape.mode != "3d" else subgroup(self.stage, self.width_ranks, "width")

    @property
    def width_ranks(self) -> list[int]:
        """The ranks of the stage that are in `width`."""
        layers = range(self.shape.side) if self.shape.mode == "3d" else (self.at.layer,)
        return [self.shape.rank_at(layer, row, self.at.column) for layer in layers for row in range(self.shape.side)]

    @cached_property
    def copies(self) -> Group:
        """The ranks that have the same weights as this one, for other tokens: none but on a grid of several squares."""
        return self.depth if self.shares_weights else solo()

    @property
    def hidden(self) -> Group:
        """The ranks that have the other columns of the same hidden states."""
        return self.depth if self.shape.mode == "3d" else self.row

    @property
    def shares_weights(self) -> bool:
        """Whether other ranks have the same weights, for other tokens."""
        return self.shape.mode == "2.5d"

    def hidden_range(self, width: int) -> Range:
        """The columns of hidden states held here."""
        return blocks(width, self.shape.side)[self.hidden.rank]

    def weight_ranges(self, width: int) -> list[Range]:
        """The part of D that each rank of this column has of the weights."""
        if self.shape.mode != "3d":
            return blocks(width, self.shape.side)
        start, stop = self.hidden_range(width)
        return [(start + a, start + b) for a, b in blocks(stop - start, self.shape.side)]

    def weight_range(self, width: int) -> Range:
        """The part of D that this rank has of the weights."""
        return self.weight_ranges(width)[self.at.row]

    def looked_up(self) -> range:
        """The blocks of tokens whose rows of the embedding this rank looks up, in its part of vocabulary and width."""
        first, count = 0, self.shape.token_blocks
        if self.shape.mode != "3d":
            first, count = self.at.layer * self.shape.side, self.shape.side
        return range(first, first + count)

    def takers(self) -> list[int]:
        """The ranks that each block of `looked_up` goes to."""
        side, (layer, row, _) = self.shape.side, self.at
        if self.shape.mode == "3d":
            return [self.shape.rank_at(layer, *divmod(block, side)) for block in self.looked_up()]
        return [self.shape.rank_at(layer, block, row) for block in range(side)]

    def givers(self, width: int) -> list[tuple[int, Range]]:
        """The ranks that looked up this rank's tokens, and which of the columns held here each gives a part of."""
        side, (layer, _, column) = self.shape.side, self.at
        start, stop = self.hidden_range(width)
        if self.shape.mode != "3d":
            return [(self.shape.rank_at(layer, column, n), (0, stop - start)) for n in range(side)]
        parts = [(a - start, b - start) for a, b in self.weight_ranges(width)]
        return [(self.shape.rank_at(layer, row, n), parts[row]) for row in range(side) for n in range(side)]

    def _axis(self, name: str, rank_of: Callable[[int], int], size: int) -> Group:
        return subgroup(self.stage, [rank_of(n) for n in range(size)], name)


def subgroup(group: Group, ranks: Sequence[int], name: str) -> Group:
    """These ranks of a group, of which this is one, over the same links."""
    others = {n: rank for n, rank in enumerate(ranks) if rank != group.rank}
    send = {n: group.send[rank] for n, rank in others.items()}
    recv = {n: group.recv[rank] for n, rank in others.items()}
    part = Group(list(ranks).index(group.rank), len(ranks), send, recv, name)
    part.device_links = None if group.device_links is None else group.device_links.among(ranks)
    return part


def blocks(width: int, count: int) -> list[Range]:
    """A width cut into so many blocks, as even as can be."""
    return list(proportional(width, (1,) * count, "hidden size"))
