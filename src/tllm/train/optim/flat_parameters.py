"""`FlatParameters`: a rank's parameters as views of flat runs of memory, one for each bucket, and this rank's range
of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tllm.parallel.shard import shard_of
from tllm.train.gradients.bucket_layout import ParameterSpan, spans
from tllm.train.gradients.gradient_buckets import GradientBuckets
from tllm.train.state.tensor_blocks import TensorBlock, blocks_of, flat_blocks


class FlatParameters:
    """`mine[number]` is this rank's range of a bucket's run: a part of it, or with zero 3 all that stays of it.

    Such a run has memory only between `take` and `let_go`. The parameters are the same objects throughout.
    """

    def __init__(self, buckets: GradientBuckets) -> None:
        self.buckets = buckets
        self.whole = [self._lay(number) for number in range(len(buckets.buckets))]
        self.mine = [run[start:stop] for run, (start, stop) in zip(self.whole, buckets.ranges, strict=True)]
        for number, mine in enumerate(self.mine):
            if self.is_spread(number):
                self.mine[number] = mine.clone()
                self.let_go(number)

    def is_spread(self, number: int) -> bool:
        """Whether a bucket's weights lie spread over its group."""
        return self.buckets.zero == 3 and self.buckets.group_of(number).size > 1

    def take(self, number: int) -> None:
        """Memory for a bucket's whole run, its values not yet there."""
        run = self.whole[number]
        run.untyped_storage().resize_(run.numel() * run.itemsize)

    def let_go(self, number: int) -> None:
        """The memory that `take` took."""
        self.whole[number].untyped_storage().resize_(0)

    def gather(self, number: int) -> None:
        """The whole run, by every rank of the bucket's group from its range."""
        bucket, group, mine = self.buckets.buckets[number], self.buckets.group_of(number), self.mine[number]
        run = self.whole[number]
        here = run if run.is_cpu else torch.empty_like(run, device="cpu")
        parts = [here[slice(*bucket.range_of(rank, group.size))] for rank in range(group.size)]
        if here is not run or self.is_spread(number):
            parts[group.rank].copy_(mine)
        group.exchange(dict.fromkeys(group.send, mine.cpu()), {rank: parts[rank] for rank in group.recv})
        if here is not run:
            run.copy_(here)

    def fill(self, fill: Callable[[nn.Module], object]) -> None:
        """Values for all parameters, of which `fill` is given those of a bucket at a time; only ranges stay."""
        for number, (bucket, (start, stop)) in enumerate(zip(self.buckets.buckets, self.buckets.ranges, strict=True)):
            spread = self.is_spread(number)
            if spread:
                self.take(number)
            fill(nn.ParameterList(self.buckets.parameters[index] for index in bucket.parameters))
            if spread:
                self.mine[number].copy_(self.whole[number][start:stop])
                self.let_go(number)

    def spans(self, number: int) -> Iterator[ParameterSpan]:
        """What of each parameter lies in this rank's range of a bucket."""
        return spans(self.buckets.buckets[number], self.buckets.parameters, *self.buckets.ranges[number])

    def blocks(self) -> list[TensorBlock]:
        """The blocks of the model's weights that stay on this rank."""
        blocks = list[TensorBlock]()
        for number, bucket in enumerate(self.buckets.buckets):
            if self.is_spread(number):
                for parameter, start, held in self.spans(number):
                    flat = self.mine[number][held]
                    blocks += flat_blocks(shard_of(parameter), tuple(parameter.shape), start, flat)
            else:
                for index in bucket.parameters:
                    parameter = self.buckets.parameters[index]
                    blocks += blocks_of(shard_of(parameter), parameter)
        return blocks

    @property
    def nbytes(self) -> int:
        """Memory of weights at this moment."""
        beside = [mine.nbytes for number, mine in enumerate(self.mine) if self.is_spread(number)]
        return sum(beside) + sum(run.untyped_storage().nbytes() for run in self.whole)

    def _lay(self, number: int) -> Tensor:
        """A bucket's parameters moved into one run of memory."""
        bucket, parameters = self.buckets.buckets[number], self.buckets.parameters
        first = parameters[bucket.parameters[0]]
        run = torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
        for index, view in zip(bucket.parameters, bucket.views(run, parameters), strict=True):
            if has_memory(parameters[index]):
                view.copy_(parameters[index].detach())
            parameters[index].data = view
        return run


def has_memory(parameter: Tensor) -> bool:
    return parameter.untyped_storage().nbytes() >= parameter.nbytes
