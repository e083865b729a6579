"""`Update`: one rank's weights as flat runs and what the optimizer keeps of them, all of it or a range (1910.02054).

With Ψ parameters of b bytes on each rank, n dp ranks and S bytes of optimizer state a parameter (8 for AdamW, 4 for
SGD; 4 more for the float32 weights of 16-bit ones), a rank holds between steps, to an element a bucket:

    zero 0   Ψ (b + 4 + S)        zero 1   Ψ (b + 4 + S / n)        zero 2   Ψ (b + (4 + S) / n)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tllm.train.flat import wide
from tllm.train.gradients import Buckets
from tllm.train.optimizer import Optimizer

WIDE = "float32"
"""The state's name of the weights as they are updated, where the model's own are narrower."""


class Held(NamedTuple):
    """Elements [start, start + len(flat)) of a parameter's state called `name`, laid out row by row. A view."""

    parameter: nn.Parameter
    name: str
    start: int
    flat: Tensor


class Update:
    """Takes the gradients of `buckets` into the weights. Parameters become views of runs of memory made here.

    Weight decay is for the buckets that say so. Every rank has the same new weights to the bit, however they are cut.
    """

    def __init__(self, buckets: Buckets, optimizer: Optimizer, weight_decay: float = 0.0) -> None:
        self.buckets, self.optimizer, self.weight_decay = buckets, optimizer, weight_decay
        self.runs = [self._lay(number) for number in range(len(buckets.buckets))]
        self.weights = [self._own(run, *part) for run, part in zip(self.runs, buckets.ranges, strict=True)]
        self.states = [{name: torch.zeros_like(own) for name in optimizer.states} for own in self.weights]

    def apply(self, step: int, rate: float) -> None:
        """The weights after step `step`, counted from 1, on every rank of a bucket's group."""
        for number, (bucket, run) in enumerate(zip(self.buckets.buckets, self.runs, strict=True)):
            own, (start, stop) = self.weights[number], self.buckets.ranges[number]
            decay = self.weight_decay if bucket.decays else 0.0
            self.optimizer.update(own, self.buckets.held(number), self.states[number], step, rate, decay)
            mine = run[start:stop]
            if own.dtype != run.dtype:
                mine.copy_(own)
            if self.buckets.zero:
                group = self.buckets.group_of(number)
                parts = group.all_gather(mine, [(count,) for count in bucket.counts(group.size)])
                for rank, part in enumerate(parts):
                    if rank != group.rank:
                        run[slice(*bucket.range_of(rank, group.size))].copy_(part)

    def held(self) -> Iterator[Held]:
        """Every tensor of this rank beside the model's weights that a save must keep, parameter by parameter."""
        for number, bucket in enumerate(self.buckets.buckets):
            first, last = self.buckets.ranges[number]
            tensors = dict(self.states[number])
            if self.weights[number].dtype != self.runs[number].dtype:
                tensors[WIDE] = self.weights[number]
            for index, at in zip(bucket.parameters, bucket.starts, strict=True):
                parameter = self.buckets.parameters[index]
                start, stop = max(at, first), min(at + parameter.numel(), last)
                if start < stop:
                    for name, tensor in tensors.items():
                        yield Held(parameter, name, start - at, tensor[start - first : stop - first])

    def take_weights(self) -> None:
        """Begin from the model's weights as they are now, after they were filled from a folder without this state."""
        for own, run, (start, stop) in zip(self.weights, self.runs, self.buckets.ranges, strict=True):
            if own.dtype != run.dtype:
                own.copy_(run[start:stop])

    @property
    def nbytes(self) -> int:
        """Memory of the optimizer's state and of wide weights beside the model's own."""
        states = sum(tensor.nbytes for state in self.states for tensor in state.values())
        beside = zip(self.weights, self.runs, strict=True)
        return states + sum(own.nbytes for own, run in beside if own.dtype != run.dtype)

    def _lay(self, number: int) -> Tensor:
        """A bucket's parameters moved into one run of memory."""
        bucket, parameters = self.buckets.buckets[number], self.buckets.parameters
        first = parameters[bucket.parameters[0]]
        run = torch.empty(bucket.size, dtype=first.dtype, device=first.device)
        for index, view in zip(bucket.parameters, bucket.views(run, parameters), strict=True):
            view.copy_(parameters[index].detach())
            parameters[index].data = view
        return run

    def _own(self, run: Tensor, start: int, stop: int) -> Tensor:
        """What the optimizer moves: this rank's range, in a wider dtype where the weights' own is narrow."""
        mine = run[start:stop]
        return mine if wide(run.dtype) == run.dtype else mine.to(wide(run.dtype))
