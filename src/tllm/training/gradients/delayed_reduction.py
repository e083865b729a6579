"""`DelayedReduction`: sums a step's gradients while the next step computes, and applies the sum one step later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.reduction import GradientGroups, Reduction
from tllm.training.state.tensor_blocks import StateSlice, TensorBlock, optimizer_blocks, update_dtype

ON_THE_WAY = "on_the_way"
"""The state's name of sums that are still to be applied."""


class DelayedReduction:
    """A `Reduction` that sums by another one, `inner`, and returns the sum of the step before: zeros the first time.

    The weights of step k + 1 are w_k - learning_rate * u(g(w_{k-1})), so that a link has a whole step's time. A copy of
    the gradients is on its way, 4 bytes a parameter.

    `groups` are the buckets' own ranks by links of their own: those of the buckets serve norms and weights meanwhile.
    """

    def __init__(self, buckets: GradientBuckets, inner: Reduction, groups: GradientGroups) -> None:
        assert groups.dp is not buckets.layout.groups.dp, "two threads cannot share a group"
        self.buckets, self.layout, self.inner, self.groups = buckets, buckets.layout, inner, groups
        self._late: dict[int, Future[Tensor]] = {}
        self._kept: list[Tensor] = []  # what came last of each bucket, where copies are made of it
        self._waits = torch.zeros(1, dtype=torch.uint8)  # whether a step's sum is still to be applied
        self._thread = ThreadPoolExecutor(1, f"tllm-late-{groups.dp.rank}")

    @property
    def on_the_way(self) -> bool:
        """Whether a step's sum is still to come: between steps, whether the next one has something to apply."""
        return bool(self._waits)

    def all_reduce(self, number: int, run: Tensor, group: Group) -> Tensor:
        if group.size == 1:  # nobody to wait for
            return self.inner.all_reduce(number, run, group)
        sent = run.clone()
        own = self.groups.summing(self.layout.buckets[number].spread)
        return run.copy_(self._swap(number, run, lambda: self.inner.all_reduce(number, sent, own)))

    def reduce_scatter(self, number: int, run: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        sent, own = run.clone(), self.groups.summing(self.layout.buckets[number].spread)
        none = run[: counts[group.rank]]
        return self._swap(number, none, lambda: self.inner.reduce_scatter(number, sent, counts, own).clone())

    def consolidate(self) -> None:
        """After `drain`."""
        self.inner.consolidate()

    def checkpoint_slices(self) -> Iterable[StateSlice]:
        return self.inner.checkpoint_slices()

    def replica_slices(self) -> Iterable[StateSlice]:
        """Has its values when `when_ready` says so."""
        return self.inner.replica_slices()

    def layout_bound_blocks(self) -> Iterable[TensorBlock]:
        return self.inner.layout_bound_blocks()

    def sums(self) -> list[TensorBlock]:
        """The sums on their way, as far as this rank gets them, and whether there are any; see `when_ready`.

        Being asked for, they are kept from now on: 4 bytes a parameter more, or a range of it with ZeRO.
        """
        if not self._kept:
            for (start, stop), bucket in zip(self.layout.ranges, self.layout.buckets, strict=True):
                first = self.layout.parameters[bucket.parameters[0]]
                self._kept.append(torch.zeros(stop - start, dtype=update_dtype(first.dtype), device=first.device))
        held = [
            StateSlice(parameter, ON_THE_WAY, start, kept[place])
            for number, kept in enumerate(self._kept)
            for parameter, start, place in self.layout.spans(number)
        ]
        return [TensorBlock(ON_THE_WAY, ((0, 1),), self._waits), *optimizer_blocks(held)]

    def when_ready(self, work: Callable[[], None]) -> Future[None]:
        """After the sums that are on their way have come, and before those of another step change anything."""
        under_way = list(self._late.values())

        def when_come() -> None:
            for late in under_way:
                late.result()
            work()

        return self._thread.submit(when_come)

    def snapshot_restored(self) -> None:
        """What `sums` gave, `replica_slices` and `layout_bound_blocks` were filled as they were between two steps."""
        self._late.clear()
        for number, kept in enumerate(self._kept if self.on_the_way else []):
            self._late[number] = Future()
            self._late[number].set_result(kept.clone())

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + sum(kept.nbytes for kept in self._kept)

    def drain(self) -> None:
        """Put the sums of the last step into the buckets, to be applied now: before a save, and at the end."""
        for number, late in self._late.items():
            self.buckets.set_reduced(number, late.result())
        self._thread.submit(lambda: None).result()  # snapshots may still copy what is consolidated next
        self._late.clear()
        self._waits.zero_()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _swap(self, number: int, like: Tensor, send: Callable[[], Tensor]) -> Tensor:
        """The sum of the step before, and this one's sent off."""
        before = self._late.get(number)
        total = torch.zeros_like(like) if before is None else before.result()
        self._waits.fill_(1)
        self._late[number] = self._thread.submit(self._keep, number, send)
        return total

    def _keep(self, number: int, send: Callable[[], Tensor]) -> Tensor:
        total = send()
        if self._kept:
            self._kept[number].copy_(total)
        return total
