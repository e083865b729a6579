"""`ServerState`: the weights of one server's segments, the optimizer's state of them, and how gradients move them.

With Ψ parameters of b bytes, S bytes of optimizer state a parameter (8 for AdamW, 4 for SGD; 4 more for the float32
weights of 16-bit ones), R replicas and n servers, a server holds, to a few rows of the table a bucket:

    Ψ (b + S) / n between steps        4 Ψ R / n more of gradients while they come, of the table the rows pushed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tllm.training.gradients.bucket_layout import GradientBucket, spans
from tllm.training.optim.optimizer import Optimizer
from tllm.training.optim.sharded_update import FLOAT32_WEIGHTS
from tllm.training.parameter_server.segments import ServerSegment
from tllm.training.state.tensor_blocks import StateSlice, TensorBlock, optimizer_blocks, update_dtype


class Gradient(NamedTuple):
    """A tensor for each segment: of the table these rows, by their ascending numbers in the segment, else all."""

    parts: list[Tensor]
    rows: Tensor


class ServerState:
    """Of `parameters` only shapes, dtypes and shards are read: they may be on the meta device."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[GradientBucket],
        segments: Sequence[ServerSegment],
        optimizer: Optimizer,
        weight_decay: float = 0.0,
    ) -> None:
        self.parameters, self.buckets, self.segments = parameters, buckets, segments
        self.optimizer = optimizer
        self.dtypes = [parameters[buckets[segment.bucket].parameters[0]].dtype for segment in segments]
        self._decays = [weight_decay if buckets[segment.bucket].decays else 0.0 for segment in segments]
        self._spans = [list(spans(buckets[one.bucket], parameters, one.start, one.stop)) for one in segments]
        self._weights = [
            torch.zeros(segment.size, dtype=dtype) for segment, dtype in zip(segments, self.dtypes, strict=True)
        ]
        # The weights themselves where they are float32 already.
        self._float32 = [weights.to(update_dtype(weights.dtype)) for weights in self._weights]
        self._states = [{name: torch.zeros_like(own) for name in optimizer.states} for own in self._float32]

    def receive_weights(self, weights: Sequence[Tensor]) -> None:
        """Begin from these weights."""
        for own, given in zip(self._weights, weights, strict=True):
            own.copy_(given)
        self.take_weights()

    def take_weights(self) -> None:
        """Begin from the weights as they are, after they were filled from a save without float32 ones."""
        for own, weights in zip(self._float32, self._weights, strict=True):
            if own is not weights:
                own.copy_(weights)

    def weights(self, rows: Tensor) -> list[Tensor]:
        """A copy of the weights, of the table these rows only."""
        return [
            segment.by_rows(own)[rows] if segment.row else own.clone()
            for segment, own in zip(self.segments, self._weights, strict=True)
        ]

    def nothing(self) -> Gradient:
        """The gradient where no replica has anything to learn from: 0, by which weights move all the same."""
        held = zip(self.segments, self._float32, strict=True)
        parts = [own.new_zeros(0, segment.row) if segment.row else torch.zeros_like(own) for segment, own in held]
        return Gradient(parts, torch.empty(0, dtype=torch.int64))

    def square(self, gradient: Gradient) -> float:
        """The sum of a gradient's squares, in float64."""
        total = 0.0
        for segment, held_spans, part in zip(self.segments, self._spans, gradient.parts, strict=True):
            for held in [part] if segment.row else [part[span.held] for span in held_spans]:
                norm = float(torch.linalg.vector_norm(held, dtype=torch.float64))
                total += norm * norm  # inf where it is too large, where a power would raise
        return total

    def update(self, gradient: Gradient, number: int, learning_rate: float, factor: float = 1.0) -> None:
        """Move the weights by `factor` times a gradient, which is gone then. `number` counts updates from 1.

        Rows of the table that nobody pushed have a gradient of 0 and are moved by what the optimizer remembers.
        """
        for place, (segment, part) in enumerate(zip(self.segments, gradient.parts, strict=True)):
            own, weights = self._float32[place], self._weights[place]
            whole = part
            if segment.row:
                whole = torch.zeros_like(own)
                segment.by_rows(whole)[gradient.rows] = part
            if factor != 1.0:
                whole.mul_(factor)
            self.optimizer.update(own, whole, self._states[place], number, learning_rate, self._decays[place])
            if own is not weights:
                weights.copy_(own)

    def state_slices(self) -> Iterator[StateSlice]:
        """Every tensor that a save must keep, the weights under the name ""."""
        for held_spans, own, weights, state in zip(
            self._spans, self._float32, self._weights, self._states, strict=True
        ):
            tensors = {"": weights, **state, **({} if own is weights else {FLOAT32_WEIGHTS: own})}
            for parameter, start, held in held_spans:
                for name, tensor in tensors.items():
                    yield StateSlice(parameter, name, start, tensor[held])

    def blocks(self) -> list[TensorBlock]:
        """The same as blocks of the checkpoint's tensors: what is saved, and what a save fills."""
        return optimizer_blocks(self.state_slices())

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights as replicas get them."""
        return sum(weights.nbytes for weights in self._weights)

    @property
    def state_bytes(self) -> int:
        """Memory of the optimizer's state and of float32 weights."""
        beside = [own.nbytes for own, weights in zip(self._float32, self._weights, strict=True) if own is not weights]
        return sum(beside) + sum(tensor.nbytes for state in self._states for tensor in state.values())


def tree_sum(gradients: Sequence[Gradient | None], segments: Sequence[ServerSegment]) -> Gradient | None:
    """The sum over replicas, ((g_0 + g_1) + (g_2 + g_3)) + … as groups add, in memory of theirs. None is a zero."""
    if len(gradients) == 1:
        return gradients[0]
    full = 1 << (len(gradients) - 1).bit_length() - 1
    left, right = tree_sum(gradients[:full], segments), tree_sum(gradients[full:], segments)
    return _added(left, right, segments) if left is not None and right is not None else left or right


def _added(left: Gradient, right: Gradient, segments: Sequence[ServerSegment]) -> Gradient:
    rows, places = torch.unique(torch.cat([left.rows, right.rows]), return_inverse=True)
    of_left, of_right = places.split([len(left.rows), len(right.rows)])
    parts = []
    for segment, a, b in zip(segments, left.parts, right.parts, strict=True):
        if segment.row:
            total = torch.zeros(len(rows), segment.row, dtype=a.dtype)
            total[of_left] = a
            total[of_right] += b
            parts.append(total)
        else:
            parts.append(a.add_(b))
    return Gradient(parts, rows)
