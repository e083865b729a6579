"""Gradients of one rank, gathered over microbatches by hooks and summed over ranks while backward still runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

from tllm.comm.collectives.group import Group
from tllm.parallel.replicated import ReplicatedParameters
from tllm.parallel.shard import shard_of
from tllm.spec.plan import Zero
from tllm.train.gradients.accumulation_order import ShardLength, addition, as_tree, one_after_another
from tllm.train.gradients.bucket_layout import BUCKET_BYTES, Decays, GradientBucket, lay_out, matrices
from tllm.train.gradients.non_finite import bad_names
from tllm.train.gradients.reduction import Exact, GradientGroups, Reduction
from tllm.train.state.tensor_blocks import blocks_of, wide

T = TypeVar("T")

PIECE = 2**20
"""Numbers, about, that are made wide at a time."""

_STARTING = threading.Lock()
"""Held while a thread is given its number of helpers, which torch keeps in one place for all of a process."""


class GradientBuckets:
    """The sums of gradients over the microbatches of every dp rank, in float32 (float64 of float64 weights).

    A bucket is summed over its group, by `reduction`, when the last microbatch has added to all its parameters: in a
    thread of its own and in one order, however many rows each rank has. With `zero` of 1 or more each rank is given
    the sum of its own range of a bucket only, and from 2 on the rest of the bucket's memory goes back at once.

    With `deterministic` the sums are the same to the bit for every number of ranks that `check_deterministic` lets by.

    One thread for both groups cannot lock up: buckets summed over dp come in one order on all its ranks, and those
    over edp stand at the same places between them on all of edp.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        groups: GradientGroups,
        replicas: ReplicatedParameters,
        zero: Zero = 0,
        bucket_bytes: int = BUCKET_BYTES,
        decays: Decays = matrices,
        reduction: Reduction | None = None,
        units: Sequence[int] | None = None,
        deterministic: bool = False,
    ) -> None:
        self.parameters, self.groups, self.replicas = list(parameters), groups, replicas
        self.reduction = reduction or Exact()
        self.zero: Zero = zero if groups.dp.size > 1 else 0
        self.buckets = lay_out(self.parameters, bucket_bytes, decays, units)
        self.ranges = [self._range(number) for number in range(len(self.buckets))]
        self._bucket_of = {index: number for number, b in enumerate(self.buckets) for index in b.parameters}
        self._starts = {index: at for b in self.buckets for index, at in zip(b.parameters, b.starts, strict=True)}
        self._runs: list[list[Tensor]] = [[] for _ in self.buckets]  # of each bucket, by level
        self._held: list[Tensor | None] = [None] * len(self.buckets)
        self._shard_length: ShardLength = as_tree if deterministic else one_after_another
        self._length = self._expected = 0
        self._added = [0] * len(self.parameters)
        self._lacking = [0] * len(self.buckets)
        self._sums: list[Future[None]] = []
        self.went_bad: list[str] = []
        self._thread = _lone_thread(f"tllm-dp-{groups.dp.rank}") if groups.dp.size > 1 else None
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]

    def begin(self, microbatches: int) -> None:
        """Start a step in which each parameter gets `microbatches` gradients on this rank, perhaps none."""
        assert not self._sums, "the step before is not finished"
        self.went_bad = []
        self._expected, self._length = microbatches, self._shard_length(microbatches, self.groups.dp.size)
        self._added = [0] * len(self.parameters)
        self._lacking = [len(bucket.parameters) for bucket in self.buckets]

    def finish(self) -> None:
        """Wait until every gradient is the sum over microbatches, the ranks of its group and holders of parts of it."""
        for index in range(len(self.parameters)):
            if self._added[index] == 0:
                self._view(index).zero_()
        whole = sum(not bucket.partial for bucket in self.buckets)
        self._sum_up_to(whole)
        if whole < len(self.buckets):
            self.replicas.sum_partial([self._partial(index) for index in range(len(self.parameters))])
        self._sum_up_to(len(self.buckets))
        sums, self._sums = self._sums, []
        for done in sums:
            done.result()

    def in_turn(self, work: Callable[[], T]) -> Future[T]:
        """Have the thread do what uses the groups during a step; every rank calls at the same places of its step."""
        assert self._thread is not None, "a rank alone has nobody to wait for"
        return self._thread.submit(work)

    def group_of(self, number: int) -> Group:
        """The ranks over which a bucket is summed and, with `zero`, cut into ranges."""
        return self.groups.edp if self.buckets[number].spread else self.groups.dp

    def held(self, number: int) -> Tensor:
        """The gradient of this rank's range of a bucket, after `finish`."""
        held = self._held[number]
        assert held is not None, "a gradient is there when `finish` has been called"
        return held

    def put(self, number: int, gradient: Tensor) -> None:
        """Let this be what `held` gives, until the next step."""
        self._keep(number, gradient)

    def gradient(self, index: int) -> Tensor:
        """The whole gradient of a parameter, after `finish`, where no range was cut from it."""
        assert not self.zero
        return self._view(index)

    @property
    def nbytes(self) -> int:
        """Memory that gradients take now."""
        cut = [held for number, held in enumerate(self._held) if self.zero >= 2 and self.group_of(number).size > 1]
        return sum(one.nbytes for one in (*cut, *chain.from_iterable(self._runs)) if one is not None)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _range(self, number: int) -> tuple[int, int]:
        """[start, stop) of a bucket that this rank keeps."""
        bucket, group = self.buckets[number], self.group_of(number)
        return bucket.range_of(group.rank, group.size) if self.zero else (0, bucket.size)

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None and self._added[index] < self._expected, "a gradient more than begun for"
            level, starts, stop = addition(self._added[index], self._length)
            view = self._view(index, level)
            if starts:
                view.copy_(gradient)
            else:
                add_narrow(view, gradient)
            for upper in range(level, stop, -1):
                self._view(index, upper - 1).add_(self._view(index, upper))
            self._added[index] += 1
            if self._added[index] == self._expected:
                self._lacking[self._bucket_of[index]] -= 1
                self._sum_what_is_ready()

        return add

    def _view(self, index: int, level: int = 0) -> Tensor:
        """Where a parameter's gradient is summed; its bucket's memory is taken at the first one's."""
        number, parameter = self._bucket_of[index], self.parameters[index]
        runs, start = self._runs[number], self._starts[index]
        while len(runs) <= level:
            size = self.buckets[number].size
            runs.append(torch.zeros(size, dtype=wide(parameter.dtype), device=parameter.device))
        return runs[level][start : start + parameter.numel()].view(parameter.shape)

    def _partial(self, index: int) -> Tensor:
        """A parameter's gradient where other ranks hold the rest of it; the memory of others may be given back."""
        return self._view(index) if self.buckets[self._bucket_of[index]].partial else torch.empty(0)

    def _sum_what_is_ready(self) -> None:
        ready = len(self._sums)
        while ready < len(self.buckets) and not self._lacking[ready] and not self.buckets[ready].partial:
            ready += 1
        self._sum_up_to(ready)

    def _sum_up_to(self, stop: int) -> None:
        for number in range(len(self._sums), stop):
            del self._runs[number][1:]
            if self._thread is None:
                self._held[number] = self._runs[number][0]
                done: Future[None] = Future()
                done.set_result(None)
            else:
                done = self._thread.submit(self._sum, number, self.buckets[number])
            self._sums.append(done)

    def _sum(self, number: int, bucket: GradientBucket) -> None:
        """One bucket over its group, in the thread, which alone uses the groups until `finish` returns."""
        run, group = self._runs[number][0], self.group_of(number)
        self._note_bad(bucket, run)
        if not self.zero or group.size == 1:
            self._held[number] = self.reduction.all_reduce(number, run, group)
            return
        start, stop = self.ranges[number]
        mine = self.reduction.reduce_scatter(number, run, bucket.counts(group.size), group)
        if self.zero == 1:
            held = self._held[number] = run[start:stop]
            if mine.data_ptr() != held.data_ptr():
                held.copy_(mine)
            return
        self._keep(number, mine)
        self._runs[number].clear()

    def _keep(self, number: int, gradient: Tensor) -> None:
        """In memory that is taken once: what comes anew each step leaves holes between what stays."""
        held = self._held[number]
        if held is None:
            self._held[number] = gradient.clone()
        else:
            held.copy_(gradient)

    def _note_bad(self, bucket: GradientBucket, run: Tensor) -> None:
        """Keep the names of what is no number here, before its sum makes it none on every rank."""
        if not bool(run.sum().isfinite()):
            for index, view in zip(bucket.parameters, bucket.views(run, self.parameters), strict=True):
                self.went_bad += bad_names(blocks_of(shard_of(self.parameters[index]), view))


def add_narrow(sums: Tensor, gradient: Tensor) -> None:
    """Add a gradient of the same shape, which may have fewer bits, row by row then: of all that torch adds it makes a
    wide copy first, which of a table of 128,000 words of 4,096 numbers takes 2 GiB."""
    rows = max(1, PIECE * len(sums) // sums.numel()) if sums.dtype != gradient.dtype else len(sums)
    for mine, more in zip(torch.split(sums, rows), torch.split(gradient, rows), strict=True):
        mine.add_(more)


def _lone_thread(name: str) -> ThreadPoolExecutor:
    """A thread whose kernels call no helper threads, which would take the cores that backward's keep spinning on.

    A thread takes the number that was last set anywhere when it first looks, so it looks before that is set back.
    """
    with _STARTING:
        threads = torch.get_num_threads()
        executor = ThreadPoolExecutor(1, name)
        executor.submit(torch.set_num_threads, 1).result()
        executor.submit(torch.get_num_threads).result()
        torch.set_num_threads(threads)
    return executor
