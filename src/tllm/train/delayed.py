"""`Delayed`: the sum of a step's gradients travels while the next step computes, and is applied one step late."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from tllm.comm.group import Group
from tllm.train.blocks import Held
from tllm.train.gradients import Buckets
from tllm.train.reduction import GradientGroups, Reduction


class Delayed:
    """A `Reduction` that sends by another and gives what it was given the step before: zeros the first time.

    The weights of step k + 1 are w_k - rate * u(g(w_{k-1})), so that a link has a whole step's time. A copy of the
    gradients is on its way, 4 bytes a parameter.

    `groups` are the buckets' own ranks by links of their own: those of the buckets serve norms and weights meanwhile.
    """

    def __init__(self, buckets: Buckets, inner: Reduction, groups: GradientGroups) -> None:
        assert groups.dp is not buckets.groups.dp, "two threads cannot share a group"
        self.buckets, self.inner, self.groups = buckets, inner, groups
        self._late: dict[int, Future[Tensor]] = {}
        self._thread = ThreadPoolExecutor(1, f"tllm-late-{groups.dp.rank}")

    @property
    def on_the_way(self) -> bool:
        """Whether a step's sum is still to come: between steps, whether the next one has something to apply."""
        return bool(self._late)

    def all_reduce(self, number: int, run: Tensor, group: Group) -> Tensor:
        sent = run.clone()
        return run.copy_(self._swap(number, run, lambda: self.inner.all_reduce(number, sent, self._group_of(number))))

    def reduce_scatter(self, number: int, run: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        sent, own = run.clone(), self._group_of(number)
        none = run[: counts[group.rank]]
        return self._swap(number, none, lambda: self.inner.reduce_scatter(number, sent, counts, own))

    def settle(self) -> None:
        """After `drain`."""
        self.inner.settle()

    def held(self) -> Iterable[Held]:
        return self.inner.held()

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def drain(self) -> None:
        """Put the sums of the last step into the buckets, to be applied now: before a save, and at the end."""
        for number, late in self._late.items():
            self.buckets.held(number).copy_(late.result())
        self._late.clear()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _swap(self, number: int, like: Tensor, send: Callable[[], Tensor]) -> Tensor:
        """The sum of the step before, and this one's sent off."""
        before = self._late.get(number)
        total = torch.zeros_like(like) if before is None else before.result()
        self._late[number] = self._thread.submit(send)
        return total

    def _group_of(self, number: int) -> Group:
        return self.groups.edp if self.buckets.buckets[number].spread else self.groups.dp
