"""`Delayed`: the sum of a step's gradients travels while the next step computes, and is applied one step late."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from tllm.comm.group import Group
from tllm.ground.errors import PlanError
from tllm.train.blocks import Held
from tllm.train.gradients import Buckets
from tllm.train.reduction import Reduction


class Delayed:
    """A `Reduction` that sends by another and gives what it was given the step before: zeros the first time.

    The weights of step k + 1 are w_k - rate * u(g(w_{k-1})), so that a link has a whole step's time. A copy of the
    gradients is on its way, 4 bytes a parameter. The group belongs to the thread here until `drain` returns.
    """

    def __init__(self, buckets: Buckets, inner: Reduction) -> None:
        if buckets.zero:
            raise PlanError(
                f"delay_steps=1 sends gradients while weights are updated, and with zero={buckets.zero} both use dp",
                "leave out zero, or delay_steps",
            )
        self.buckets, self.inner = buckets, inner
        self._late: dict[int, Future[Tensor]] = {}
        self._thread = ThreadPoolExecutor(1, f"tllm-late-{buckets.groups.dp.rank}")

    @property
    def on_the_way(self) -> bool:
        """Whether a step's sum is still to come: between steps, whether the next one has something to apply."""
        return bool(self._late)

    def all_reduce(self, number: int, run: Tensor, group: Group) -> Tensor:
        before = self._late.get(number)
        total = torch.zeros_like(run) if before is None else before.result()
        self._late[number] = self._thread.submit(self.inner.all_reduce, number, run.clone(), group)
        return run.copy_(total)

    def reduce_scatter(self, number: int, run: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        raise AssertionError("refused when it was made")

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
