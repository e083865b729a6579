"""Over whom gradients are summed (`GradientGroups`), and how: the protocol `Reduction`, and `Exact`, which loses no
bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from tllm.comm.collectives.group import Group, solo
from tllm.training.state.tensor_blocks import StateSlice, TensorBlock


@dataclass(frozen=True)
class GradientGroups:
    """`dp`: the ranks that hold the same elements of ordinary parameters; `edp` those of experts spread over `ep`.

    The ranks of `ep` hold different experts; those of `dp` in all `ep.size` times as many as of `edp`.
    """

    dp: Group
    edp: Group = field(default_factory=solo)
    ep: Group = field(default_factory=solo)

    def summing(self, spread: bool) -> Group:
        """The ranks over which a bucket is summed, which is of experts spread over `ep` or of ordinary parameters."""
        return self.edp if spread else self.dp


class Reduction(Protocol):
    """How the flat gradient of bucket `number` is summed over a group. Every rank must end with the same bits."""

    def all_reduce(self, number: int, run: Tensor, group: Group) -> Tensor:
        """The sum over ranks; in place where it can."""

    def reduce_scatter(self, number: int, run: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        """This rank's range of the sum; rank p's has `counts[p]` elements. `run` may be overwritten, and hold it."""

    def consolidate(self) -> None:
        """Before a save, on every rank: move what is kept to where `checkpoint_slices` expects it."""

    def checkpoint_slices(self) -> Iterable[StateSlice]:
        """What is kept from step to step and a checkpoint must hold, as views. Valid after `consolidate`."""

    def replica_slices(self) -> Iterable[StateSlice]:
        """The same before `consolidate`, as views named for this replica: what a snapshot in memory must hold."""

    def layout_bound_blocks(self) -> Iterable[TensorBlock]:
        """What else is kept until `consolidate`, and is of use only while the model is cut as it is."""

    @property
    def nbytes(self) -> int:
        """Memory of what is kept."""


class StatelessReduction:
    """A reduction that keeps nothing from step to step."""

    def consolidate(self) -> None:
        """Nothing is kept."""

    def checkpoint_slices(self) -> Iterable[StateSlice]:
        return ()

    def replica_slices(self) -> Iterable[StateSlice]:
        return ()

    def layout_bound_blocks(self) -> Iterable[TensorBlock]:
        return ()

    @property
    def nbytes(self) -> int:
        return 0


class Exact(StatelessReduction):
    """Sends gradients as they are."""

    def all_reduce(self, number: int, run: Tensor, group: Group) -> Tensor:
        return group.all_reduce(run)

    def reduce_scatter(self, number: int, run: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        return group.reduce_scatter_(run, counts)
