"""`FlatParameters`: a rank's parameters as views of flat tensors, one a bucket, and this rank's range of each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn

from tllm.parallel.shard import shard_of
from tllm.training.gradients.bucket_layout import BucketLayout
from tllm.training.state.tensor_blocks import TensorBlock, blocks_of, flat_blocks


class FlatParameters:
    """`whole[number]` is a bucket's flat tensor, and `mine[number]` this rank's range of it.

    `mine` is a view of `whole`, but with ZeRO-3 a tensor of its own, which is all that stays between uses: `whole` has
    memory only between `allocate` and `free`. The parameters are the same objects throughout. If flat tensors are
    `kept` of a part with the same layout, they are used as they are, and the parameters have their values.
    """

    def __init__(self, layout: BucketLayout, kept: Sequence[Tensor] = ()) -> None:
        self.layout = layout
        self.whole = [self._lay(number) for number in range(len(layout.buckets))] if not kept else list(kept)
        if kept:
            for number, run in enumerate(kept):
                self._place(number, run)
        self.mine = [run[start:stop] for run, (start, stop) in zip(self.whole, layout.ranges, strict=True)]
        for number, mine in enumerate(self.mine):
            if self.is_sharded(number):
                self.mine[number] = mine.clone()
                self.free(number)

    def is_sharded(self, number: int) -> bool:
        """Whether a bucket's weights are sharded over its group (ZeRO-3)."""
        return self.layout.zero == 3 and self.layout.group_of(number).size > 1

    def allocate(self, number: int) -> None:
        """Memory for a bucket's whole flat tensor, without its values."""
        run = self.whole[number]
        run.untyped_storage().resize_(run.numel() * run.itemsize)

    def free(self, number: int) -> None:
        """Give back the memory that `allocate` took."""
        self.whole[number].untyped_storage().resize_(0)

    def gather(self, number: int) -> None:
        """All-gather a bucket's whole flat tensor from the ranges of the ranks of its group."""
        bucket, group, mine = self.layout.buckets[number], self.layout.group_of(number), self.mine[number]
        group.all_gather_into(self.whole[number], mine, bucket.counts(group.size))

    def fill(self, fill: Callable[[nn.Module], object]) -> None:
        """Values for all parameters, of which `fill` is given those of a bucket at a time; only ranges stay."""
        for number, (bucket, (start, stop)) in enumerate(zip(self.layout.buckets, self.layout.ranges, strict=True)):
            spread = self.is_sharded(number)
            if spread:
                self.allocate(number)
            fill(nn.ParameterList(self.layout.parameters[index] for index in bucket.parameters))
            if spread:
                self.mine[number].copy_(self.whole[number][start:stop])
                self.free(number)

    def blocks(self) -> list[TensorBlock]:
        """The blocks of the model's weights that stay on this rank."""
        blocks = list[TensorBlock]()
        for number, bucket in enumerate(self.layout.buckets):
            if self.is_sharded(number):
                for parameter, start, held in self.layout.spans(number):
                    flat = self.mine[number][held]
                    blocks += flat_blocks(shard_of(parameter), tuple(parameter.shape), start, flat)
            else:
                for index in bucket.parameters:
                    parameter = self.layout.parameters[index]
                    blocks += blocks_of(shard_of(parameter), parameter)
        return blocks

    @property
    def nbytes(self) -> int:
        """Memory of weights at this moment."""
        beside = [mine.nbytes for number, mine in enumerate(self.mine) if self.is_sharded(number)]
        return sum(beside) + sum(run.untyped_storage().nbytes() for run in self.whole)

    def _lay(self, number: int) -> Tensor:
        """A bucket's parameters moved into one run of memory."""
        bucket, parameters = self.layout.buckets[number], self.layout.parameters
        first = parameters[bucket.parameters[0]]
        run = torch.zeros(bucket.size, dtype=first.dtype, device=first.device)
        for index, view in zip(bucket.parameters, bucket.views(run, parameters), strict=True):
            if has_memory(parameters[index]):
                view.copy_(parameters[index].detach())
        self._place(number, run)
        return run

    def _place(self, number: int, run: Tensor) -> None:
        """Let a bucket's parameters be views of a run of memory."""
        bucket, parameters = self.layout.buckets[number], self.layout.parameters
        for index, view in zip(bucket.parameters, bucket.views(run, parameters), strict=True):
            parameters[index].data = view


def memory_layout(layout: BucketLayout, states: Sequence[str]) -> Hashable:
    """What of which tensor lies where in the memory of weights and `states`, for `FlatMemory`; None with ZeRO-3, of
    whose buckets only ranges stay."""
    if layout.zero == 3:
        return None
    parameters = [(shard_of(one), tuple(one.shape), one.dtype) for one in layout.parameters]
    return tuple(states), tuple(layout.buckets), tuple(layout.ranges), tuple(parameters)


def has_memory(parameter: Tensor) -> bool:
    return parameter.untyped_storage().nbytes() >= parameter.nbytes
