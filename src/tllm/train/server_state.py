"""`ServerState`: the weights of one server's segments, the optimizer's state of them, and the sum that moves them.

With Ψ parameters of b bytes, S bytes of optimizer state a parameter (8 for AdamW, 4 for SGD; 4 more for the float32
weights of 16-bit ones), R replicas and n servers, a server holds between steps, to a row of the table a bucket:

    Ψ (b + 4 + S) / n       and while they come       Ψ 4 R / n       of gradients, of the table the rows pushed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tllm.train.blocks import Block, optimizer_blocks
from tllm.train.flat import Bucket, wide
from tllm.train.optimizer import Optimizer
from tllm.train.server_cut import Segment
from tllm.train.zero import WIDE, Held


class ServerState:
    """Of `parameters` only shapes, dtypes and shards are read: they may be on the meta device.

    A gradient is a list with a tensor for each segment: all of its elements, or rows of the table with `rows`, their
    numbers in the segment, beside it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        segments: Sequence[Segment],
        optimizer: Optimizer,
        weight_decay: float = 0.0,
    ) -> None:
        self.parameters, self.buckets, self.segments = parameters, buckets, segments
        self.optimizer = optimizer
        self.dtypes = [parameters[buckets[segment.bucket].parameters[0]].dtype for segment in segments]
        self._decays = [weight_decay if buckets[segment.bucket].decays else 0.0 for segment in segments]
        self._weights = [
            torch.zeros(segment.size, dtype=dtype) for segment, dtype in zip(segments, self.dtypes, strict=True)
        ]
        self._wide = [weights.to(wide(weights.dtype)) for weights in self._weights]  # itself where it is wide already
        self._sums = [torch.zeros_like(own) for own in self._wide]
        self._states = [{name: torch.zeros_like(own) for name in optimizer.states} for own in self._wide]

    def receive_weights(self, weights: Sequence[Tensor]) -> None:
        """Begin from these."""
        for own, given in zip(self._weights, weights, strict=True):
            own.copy_(given)
        self.take_weights()

    def take_weights(self) -> None:
        """Begin from the weights as they are, after they were filled from a save without wide ones."""
        for own, weights in zip(self._wide, self._weights, strict=True):
            if own is not weights:
                own.copy_(weights)

    def weights(self, rows: Tensor | None) -> list[Tensor]:
        """A copy of the weights, of the table these rows only; None is all of it."""
        return [
            own.clone() if rows is None or not segment.row else own.view(-1, segment.row)[rows]
            for segment, own in zip(self.segments, self._weights, strict=True)
        ]

    def begin_sum(self) -> None:
        for total in self._sums:
            total.zero_()

    def add(self, gradient: Sequence[Tensor], rows: Tensor) -> None:
        """Add a replica's gradient to the sum."""
        for segment, total, part in zip(self.segments, self._sums, gradient, strict=True):
            if segment.row:
                total.view(-1, segment.row).index_add_(0, rows, part)
            else:
                total.add_(part)

    def square(self) -> float:
        """The sum of the squares of the sum, in float64."""
        return sum(float(torch.linalg.vector_norm(total, dtype=torch.float64)) ** 2 for total in self._sums)

    def update(self, number: int, rate: float, factor: float = 1.0) -> None:
        """Move the weights by `factor` times the sum, which is gone then. `number` counts updates from 1.

        Rows of the table that nobody pushed have a gradient of 0 and are moved by what the optimizer remembers.
        """
        for own, total, state, decay, weights in zip(
            self._wide, self._sums, self._states, self._decays, self._weights, strict=True
        ):
            if factor != 1.0:
                total.mul_(factor)
            self.optimizer.update(own, total, state, number, rate, decay)
            if own is not weights:
                weights.copy_(own)

    def held(self) -> Iterator[Held]:
        """Every tensor that a save must keep, the weights under the name ""."""
        for segment, own, weights, state in zip(self.segments, self._wide, self._weights, self._states, strict=True):
            tensors = {"": weights, **state}
            if own is not weights:
                tensors[WIDE] = own
            bucket = self.buckets[segment.bucket]
            for index, at in zip(bucket.parameters, bucket.starts, strict=True):
                parameter = self.parameters[index]
                start, stop = max(at, segment.start), min(at + parameter.numel(), segment.stop)
                for name, tensor in tensors.items() if start < stop else ():
                    yield Held(parameter, name, start - at, tensor[start - segment.start : stop - segment.start])

    def blocks(self) -> list[Block]:
        """The same as blocks of the checkpoint's tensors: what is saved, and what a save fills."""
        return optimizer_blocks(self.held())

    @property
    def nbytes(self) -> int:
        """Memory of weights, state and sum."""
        own = {id(tensor): tensor for tensor in (*self._weights, *self._wide, *self._sums)}
        states = [tensor for state in self._states for tensor in state.values()]
        return sum(tensor.nbytes for tensor in (*own.values(), *states))
