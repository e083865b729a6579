"""Error feedback (1809.07599): what a lossy sum has left out is added to the next step's gradient."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tllm.training.gradients.bucket_layout import BucketLayout, spans
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.reduction import GradientGroups
from tllm.training.state.replica_local import SUMMED, replica_local_state
from tllm.training.state.tensor_blocks import StateSlice, update_dtype

RESIDUAL = "residual"
"""The state's name of what is not sent yet."""


class Residuals:
    """A flat tensor for each bucket, zero at first. Its sum over the ranks of the group is all that is outstanding.

    So residuals may be dealt out anew over any number of ranks, and nothing is lost.
    """

    def __init__(self, layout: BucketLayout, groups: GradientGroups) -> None:
        self.layout, self.groups = layout, groups
        self._runs: dict[int, Tensor] = {}

    def of(self, number: int) -> Tensor:
        """The residual of a bucket on this rank; flat."""
        if number not in self._runs:
            bucket = self.layout.buckets[number]
            first = self.layout.parameters[bucket.parameters[0]]
            self._runs[number] = torch.zeros(bucket.size, dtype=update_dtype(first.dtype), device=first.device)
        return self._runs[number]

    def settle(self, number: int, run: Tensor) -> Tensor:
        """On a rank alone: `run` with all that is outstanding, as replicas that are gone have left it. A rank that has
        nobody to send to loses nothing on the way."""
        if number in self._runs:
            run.add_(self._runs[number])
            self._runs[number].zero_()
        return run

    def consolidate(self) -> None:
        """Sum the residuals exactly and leave each range on the rank that keeps it. Every rank of a group calls it.

        A save that keeps what is held then holds all of it, and to go on from it is to go on as if nothing was saved.
        """
        for number, bucket in enumerate(self.layout.buckets):
            group, run = self.groups.summing(bucket.spread), self.of(number)
            if group.size > 1:
                mine = group.reduce_scatter(run, bucket.counts(group.size))
                start, stop = bucket.range_of(group.rank, group.size)
                run.zero_()[start:stop].copy_(mine)

    def checkpoint_slices(self) -> Iterator[StateSlice]:
        """What this rank holds after `consolidate`, as views to save or to fill."""
        for number, bucket in enumerate(self.layout.buckets):
            group, run = self.groups.summing(bucket.spread), self.of(number)
            first, last = bucket.range_of(group.rank, group.size)
            for parameter, start, place in spans(bucket, self.layout.parameters, first, last):
                yield StateSlice(parameter, RESIDUAL, start, run[first:last][place])

    def replica_slices(self) -> Iterator[StateSlice]:
        """All that this rank has yet to send, as views."""
        for number, bucket in enumerate(self.layout.buckets):
            group, run = self.groups.summing(bucket.spread), self.of(number)
            state = replica_local_state(RESIDUAL, SUMMED, group.rank, group.size)
            for parameter, start, place in spans(bucket, self.layout.parameters, 0, bucket.size):
                yield StateSlice(parameter, state, start, run[place])

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return sum(run.nbytes for run in self._runs.values())


def lossy_parameters(buckets: GradientBuckets) -> set[int]:
    """The parameters that may lose something on the way: matrices and stacks of them, by number.

    What several ranks of a replica hold is not among them: elements that each of these sends among others would not
    stay alike.
    """
    shared = {cell.parameter for cell in buckets.replicas.cells if len(cell.holders) > 1}
    return {index for index, parameter in enumerate(buckets.layout.parameters) if parameter.ndim > 1} - shared
