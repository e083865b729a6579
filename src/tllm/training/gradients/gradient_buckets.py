"""`GradientBuckets`: a rank's gradients, accumulated over microbatches and all-reduced bucket by bucket while the
backward pass still runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from tllm.parallel.replicated import ReplicatedParameters
from tllm.parallel.shard import shard_of
from tllm.training.gradients.accumulation_order import ShardLength, addition, as_tree, one_after_another
from tllm.training.gradients.bucket_layout import BucketLayout, GradientBucket
from tllm.training.gradients.non_finite import bad_names
from tllm.training.gradients.reduction import Exact, Reduction
from tllm.training.state.tensor_blocks import blocks_of, update_dtype

T = TypeVar("T")

PIECE = 2**20
"""Elements, about, that `add_low_precision` converts at a time."""

_STARTING = threading.Lock()
"""Held while a thread is given its number of helpers, which torch keeps in one place for all of a process."""


class GradientAccumulator:
    """The sums of gradients over this rank's microbatches, in one flat tensor a bucket; float32 (float64 of float64).

    With `deterministic` the order of additions is a tree that does not depend on the number of ranks, which takes one
    more flat tensor for each level of the tree (`accumulation_order`). `flat[number]` are those of a bucket, level 0
    first, each as long as the bucket.
    """

    def __init__(self, layout: BucketLayout, deterministic: bool) -> None:
        self.layout = layout
        self.flat: list[list[Tensor]] = [[] for _ in layout.buckets]
        self._shard_length: ShardLength = as_tree if deterministic else one_after_another
        self._length = self._expected = 0
        self._added = [0] * len(layout.parameters)
        self._missing = [0] * len(layout.buckets)

    def begin(self, microbatches: int) -> None:
        """Expect so many gradients of each parameter on this rank, perhaps none."""
        self._expected, self._length = microbatches, self._shard_length(microbatches, self.layout.groups.dp.size)
        self._added = [0] * len(self.layout.parameters)
        self._missing = [len(bucket.parameters) for bucket in self.layout.buckets]

    def add(self, index: int, gradient: Tensor) -> bool:
        """Add a microbatch's gradient of a parameter; whether it was the parameter's last of the step."""
        assert self._added[index] < self._expected, "a gradient more than begun for"
        level, starts, stop = addition(self._added[index], self._length)
        view = self.view(index, level)
        if starts:
            view.copy_(gradient)
        else:
            add_low_precision(view, gradient)
        for upper in range(level, stop, -1):
            self.view(index, upper - 1).add_(self.view(index, upper))
        self._added[index] += 1
        if self._added[index] < self._expected:
            return False
        self._missing[self.layout.bucket_of[index]] -= 1
        return True

    def is_complete(self, number: int) -> bool:
        """Whether all parameters of a bucket have the gradients of all microbatches."""
        return not self._missing[number]

    def zero_unused(self) -> None:
        """Let a parameter that no microbatch used have a gradient of 0."""
        for index in range(len(self.layout.parameters)):
            if self._added[index] == 0:
                self.view(index).zero_()

    def view(self, index: int, level: int = 0) -> Tensor:
        """Where a parameter's gradient is summed; its bucket's memory is allocated at the first call."""
        number, parameter = self.layout.bucket_of[index], self.layout.parameters[index]
        levels = self.flat[number]
        while len(levels) <= level:
            size = self.layout.buckets[number].size
            levels.append(torch.zeros(size, dtype=update_dtype(parameter.dtype), device=parameter.device))
        return self.layout.view(levels[level], index)

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for levels in self.flat for flat in levels)


class GradientBuckets:
    """The sums of gradients over the microbatches of every data-parallel rank.

    Hooks on the parameters add each microbatch's gradient. When the last microbatch has added to all parameters of a
    bucket, a thread sums the bucket over its group by `reduction`, in one order on all ranks, while the backward pass
    goes on. With ZeRO 1 or more each rank is given the sum of its own range of a bucket only (reduce-scatter), and from
    2 on the rest of the bucket's memory is freed at once.

    With `deterministic` the sums are the same to the bit for every number of ranks that `check_deterministic` allows.

    One thread for both groups cannot deadlock: buckets summed over dp come in one order on all its ranks, and those
    summed over edp stand at the same places between them on all of edp.
    """

    def __init__(
        self,
        layout: BucketLayout,
        replicas: ReplicatedParameters,
        reduction: Reduction | None = None,
        deterministic: bool = False,
    ) -> None:
        self.layout, self.replicas = layout, replicas
        self.reduction = reduction or Exact()
        self.accumulator = GradientAccumulator(layout, deterministic)
        self._reduced: list[Tensor | None] = [None] * len(layout.buckets)
        self._under_way: list[Future[None]] = []
        self.non_finite_names: list[str] = []
        """Tensors whose gradient on this rank was not finite in the present step, before it was summed over ranks."""
        dp = layout.groups.dp
        self._thread = _lone_thread(f"tllm-dp-{dp.rank}") if dp.size > 1 else None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(layout.parameters)
        ]

    def begin(self, microbatches: int) -> None:
        """Start a step in which each parameter gets `microbatches` gradients on this rank, perhaps none."""
        assert not self._under_way, "the step before is not finished"
        self.non_finite_names = []
        self.accumulator.begin(microbatches)

    def finish(self) -> None:
        """Wait until every gradient is the sum over microbatches, the ranks of its group and holders of parts of it."""
        self.accumulator.zero_unused()
        buckets = self.layout.buckets
        whole = sum(not bucket.partial for bucket in buckets)
        self._reduce_up_to(whole)
        if whole < len(buckets):
            self.replicas.sum_partial([self._partial(index) for index in range(len(self.layout.parameters))])
        self._reduce_up_to(len(buckets))
        under_way, self._under_way = self._under_way, []
        for reduction in under_way:
            reduction.result()

    def run_in_order(self, work: Callable[[], T]) -> Future[T]:
        """Let the thread do other work that uses the groups during a step, at the same place of it on every rank."""
        assert self._thread is not None, "a rank alone has nobody to wait for"
        return self._thread.submit(work)

    def reduced(self, number: int) -> Tensor:
        """The summed gradient of this rank's range of a bucket, after `finish`; flat."""
        reduced = self._reduced[number]
        assert reduced is not None, "a gradient is there when `finish` has been called"
        return reduced

    def set_reduced(self, number: int, gradient: Tensor) -> None:
        """Let this be what `reduced` gives, until the next step.

        It is copied into memory that is allocated once: a new tensor each step would fragment the heap.
        """
        reduced = self._reduced[number]
        if reduced is None:
            self._reduced[number] = gradient.clone()
        else:
            reduced.copy_(gradient)

    @property
    def nbytes(self) -> int:
        """Memory that gradients take now."""
        cut = [
            reduced.nbytes
            for number, reduced in enumerate(self._reduced)
            if reduced is not None and self.layout.zero >= 2 and self.layout.group_of(number).size > 1
        ]
        return self.accumulator.nbytes + sum(cut)

    def close(self) -> None:
        """End the thread, and take the hooks off the parameters. torch keeps a hook where Python's collector does not
        see it: it would keep the old model in a worker that is given another plan."""
        for hook in self._hooks:
            hook.remove()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if self.accumulator.add(index, gradient):
                self._reduce_complete()

        return add

    def _partial(self, index: int) -> Tensor:
        """A parameter's gradient where other ranks hold the rest of it; the memory of others may be freed already."""
        bucket = self.layout.buckets[self.layout.bucket_of[index]]
        return self.accumulator.view(index) if bucket.partial else torch.empty(0)

    def _reduce_complete(self) -> None:
        """Reduce the buckets that are complete, as far as all those before them are."""
        ready, buckets = len(self._under_way), self.layout.buckets
        while ready < len(buckets) and self.accumulator.is_complete(ready) and not buckets[ready].partial:
            ready += 1
        self._reduce_up_to(ready)

    def _reduce_up_to(self, stop: int) -> None:
        for number in range(len(self._under_way), stop):
            del self.accumulator.flat[number][1:]
            if self._thread is None:
                flat, group = self.accumulator.flat[number][0], self.layout.group_of(number)
                self._reduced[number] = self.reduction.all_reduce(number, flat, group)
                done: Future[None] = Future()
                done.set_result(None)
            else:
                done = self._thread.submit(self._reduce, number, self.layout.buckets[number])
            self._under_way.append(done)

    def _reduce(self, number: int, bucket: GradientBucket) -> None:
        """One bucket over its group, in the thread, which alone uses the groups until `finish` returns."""
        flat, group = self.accumulator.flat[number][0], self.layout.group_of(number)
        self._note_non_finite(bucket, flat)
        if not self.layout.zero or group.size == 1:
            self._reduced[number] = self.reduction.all_reduce(number, flat, group)
            return
        start, stop = self.layout.ranges[number]
        mine = self.reduction.reduce_scatter(number, flat, bucket.counts(group.size), group)
        if self.layout.zero == 1:
            reduced = self._reduced[number] = flat[start:stop]
            if mine.data_ptr() != reduced.data_ptr():
                reduced.copy_(mine)
            return
        self.set_reduced(number, mine)
        self.accumulator.flat[number].clear()

    def _note_non_finite(self, bucket: GradientBucket, flat: Tensor) -> None:
        """Note which gradients are not finite on this rank, before the sum makes them so on every rank."""
        if not bool(flat.sum().isfinite()):
            parameters = self.layout.parameters
            for index, view in zip(bucket.parameters, bucket.views(flat, parameters), strict=True):
                self.non_finite_names += bad_names(blocks_of(shard_of(parameters[index]), view))


def add_low_precision(sums: Tensor, gradient: Tensor) -> None:
    """Add a gradient of the same shape, which may have fewer bits than the sums; then it is added in groups of rows.

    On the processor torch would first convert all of it: 2 GiB for a table of 128,000 words of 4,096 numbers.
    """
    is_converted = sums.dtype != gradient.dtype and not sums.is_cuda
    rows = max(1, PIECE * len(sums) // sums.numel()) if is_converted else len(sums)
    for mine, more in zip(torch.split(sums, rows), torch.split(gradient, rows), strict=True):
        mine.add_(more)


def _lone_thread(name: str) -> ThreadPoolExecutor:
    """One thread whose kernels use no helper threads: these would compete for cores with those of the backward pass.

    torch keeps the number of helpers in one place. A thread reads it when it first asks, so it asks before it is reset.
    """
    with _STARTING:
        threads = torch.get_num_threads()
        executor = ThreadPoolExecutor(1, name)
        executor.submit(torch.set_num_threads, 1).result()
        executor.submit(torch.get_num_threads).result()
        torch.set_num_threads(threads)
    return executor
