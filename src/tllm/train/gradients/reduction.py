"""Over whom gradients are summed, and how: `GradientGroups`, and `Reduction`, of which `Exact` is the plain one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from tllm.comm.collectives.group import Group, solo
from tllm.train.state.tensor_blocks import StateSlice, TensorBlock


@dataclass(frozen=True)
class GradientGroups:
    """`dp`: the ranks that hold the same elements of ordinary parameters; `edp` those of experts spread over `ep`.

    The ranks of `ep` hold different experts; those of `dp` in all `ep.size` times as many as of `edp`.
    """

    dp: Group
    edp: Group = field(default_factory=solo)
    ep: Group = field(default_factory=solo)


class Reduction(Protocol):
    """How the run of bucket `number` is summed over a group. Every rank must end with the same bits."""

    def all_reduce(self, number: int, run: Tensor, group: Group) -> Tensor:
        """The sum over ranks; in place where it can."""

    def reduce_scatter(self, number: int, run: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        """This rank's range of the sum; rank p's has `counts[p]` elements. `run` may be overwritten, and hold it."""

    def settle(self) -> None:
        """Before a save, on every rank: bring what is kept into the form that `held` gives."""

    def held(self) -> Iterable[StateSlice]:
        """What is kept from step to step and a save must have, as views."""

    def own(self) -> Iterable[StateSlice]:
        """The same as it is before `settle`, as views: what a copy in memory must have."""

    def bound(self) -> Iterable[TensorBlock]:
        """What else is kept, until `settle`, and is of use only while replicas are cut as they are."""

    @property
    def nbytes(self) -> int:
        """Memory of what is kept."""


class Plain:
    """What a reduction is that keeps nothing from step to step."""

    def settle(self) -> None:
        """There is nothing to bring anywhere."""

    def held(self) -> Iterable[StateSlice]:
        return ()

    def own(self) -> Iterable[StateSlice]:
        return ()

    def bound(self) -> Iterable[TensorBlock]:
        return ()

    @property
    def nbytes(self) -> int:
        return 0


class Exact(Plain):
    """Sends gradients as they are."""

    def all_reduce(self, number: int, run: Tensor, group: Group) -> Tensor:
        return group.all_reduce(run)

    def reduce_scatter(self, number: int, run: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        return group.reduce_scatter_(run, counts)
