"""How rows enter and leave the layers that are cut between the ranks of a tensor-parallel group.

What is not cut (norms, the residual) every rank computes for all tokens, or with sequence parallelism for a slice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.parallel.collectives import copy_to, gather_rows, reduce_from, scatter_rows
from tllm.parallel.shard import Gradient


class TensorParallelRegion:
    """Outside the cut layers every rank holds all tokens. The same calls serve a group of one, where they do nothing.

    `gradient`: what a rank computes for a parameter outside the cut layers. `has_all_rows`: whether a row outside the
    cut layers is the same token's as that row inside them.
    """

    gradient: Gradient = "whole"
    has_all_rows = True

    def __init__(self, tp: Group) -> None:
        self.tp = tp

    def enter(self, x_TD: Tensor, tokens: int | None) -> Tensor:
        """The input of a cut layer: the rows of all `tokens`."""
        return copy_to(x_TD, self.tp)

    def leave(self, y_TD: Tensor) -> Tensor:
        """The sum over ranks of what a cut layer gives; `y_TD` itself may be overwritten by it."""
        return reduce_from(y_TD, self.tp)

    def own(self, x_T: Tensor) -> Tensor:
        """Of a number for each token, those of the tokens that this rank has outside the cut layers."""
        return x_T

    def own_count(self, tokens: int) -> int:
        """How many of so many tokens those are."""
        return tokens


class SequenceParallelRegion(TensorParallelRegion):
    """Outside the cut layers each rank has a slice of the tokens (2205.05198).

    As many bytes are sent as without, and activations take less memory.
    """

    gradient: Gradient = "partial"
    has_all_rows = False

    def enter(self, x_TD: Tensor, tokens: int | None) -> Tensor:
        """All of the `tokens`, of which `x_TD` is this rank's slice."""
        assert tokens is not None, "a slice does not tell how many tokens there are"
        return gather_rows(x_TD, self.tp, slice_counts(tokens, self.tp.size))

    def leave(self, y_TD: Tensor) -> Tensor:
        """This rank's slice of the sum over ranks."""
        return scatter_rows(y_TD, self.tp, slice_counts(len(y_TD), self.tp.size))

    def own(self, x_T: Tensor) -> Tensor:
        """Those of this rank's slice."""
        return torch.split(x_T, slice_counts(len(x_T), self.tp.size))[self.tp.rank]

    def own_count(self, tokens: int) -> int:
        """How many are in this rank's slice."""
        return slice_counts(tokens, self.tp.size)[self.tp.rank]


def slice_counts(tokens: int, ranks: int) -> list[int]:
    """How many of the `tokens`, in order, each rank's slice has: as even as can be."""
    return [tokens * (rank + 1) // ranks - tokens * rank // ranks for rank in range(ranks)]
