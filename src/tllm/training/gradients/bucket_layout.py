"""`BucketLayout`: parameters laid end to end in buckets, each all-reduced at once and cut into ranges for ZeRO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from tllm.comm.collectives.group import Group
from tllm.parallel.shard import shard_of
from tllm.spec.plan import Zero
from tllm.training.gradients.reduction import GradientGroups
from tllm.training.state.tensor_blocks import update_dtype

BUCKET_BYTES = 16 * 1024 * 1024
BUCKET_BYTES_OF_GPU = 16 * BUCKET_BYTES

LINE = 16
"""Elements, 64 bytes of float32: parameters begin and ranges are cut at multiples of it.

Kernels take what lies across such a line, or does not fill it, by other instructions, which round otherwise.
"""

Kind = tuple[bool, bool, bool]
"""(partial, spread, decays) of a bucket and all that is in it."""


@dataclass(frozen=True)
class GradientBucket:
    """Parameters, by their number, one after another from `starts` in a run of `size` elements: all multiples of LINE.

    `partial`: other ranks hold the rest of their gradients, which come first. `spread`: they are experts spread over
    ep. `decays`: weight decay is for them.
    """

    parameters: tuple[int, ...]
    starts: tuple[int, ...]
    size: int
    partial: bool
    spread: bool
    decays: bool

    def views(self, run: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """The bucket's parameters, or what belongs to them, as parts of a run."""
        return [
            run[start : start + parameters[index].numel()].view(parameters[index].shape)
            for index, start in zip(self.parameters, self.starts, strict=True)
        ]

    def range_of(self, rank: int, ranks: int) -> tuple[int, int]:
        """[start, stop) that one of the ranks keeps: as even as whole lines can be."""
        lines = self.size // LINE
        return lines * rank // ranks * LINE, lines * (rank + 1) // ranks * LINE

    def counts(self, ranks: int) -> list[int]:
        """How many elements each rank's range has."""
        return [stop - start for start, stop in (self.range_of(rank, ranks) for rank in range(ranks))]


class ParameterSpan(NamedTuple):
    """Elements [start, start + len(held)) of a parameter, laid row by row; `held`: where a bucket's range has them."""

    parameter: nn.Parameter
    start: int
    held: slice


def spans(bucket: GradientBucket, parameters: Sequence[nn.Parameter], first: int, last: int) -> Iterator[ParameterSpan]:
    """What of each parameter lies in elements [first, last) of a bucket."""
    for index, at in zip(bucket.parameters, bucket.starts, strict=True):
        start, stop = max(at, first), min(at + parameters[index].numel(), last)
        if start < stop:
            yield ParameterSpan(parameters[index], start - at, slice(start - first, stop - first))


def decays(parameter: nn.Parameter) -> bool:
    """Whether weight decay is for it: not for biases, be it of a stack of experts, nor for the scales of norms."""
    return parameter.ndim > 1 and not any(piece.name.endswith("bias") for piece in shard_of(parameter).pieces)


def lay_out(
    parameters: Sequence[nn.Parameter],
    limit: int = BUCKET_BYTES,
    units: Sequence[int] | None = None,
) -> list[GradientBucket]:
    """Buckets of about `limit` bytes of gradient, in the order in which backward passes complete them.

    They go from the last parameter to the first, and one ends where its last parameter's turn comes. Those of partial
    gradients come at the very end. `units` are numbers of the parameters: those with unlike ones share no bucket.
    """
    open_runs: dict[tuple[int, Kind], list[int]] = {}
    done: list[tuple[bool, int, GradientBucket]] = []

    def close(key: tuple[int, Kind]) -> None:
        indices, kind = open_runs.pop(key), key[1]
        starts, at = [], 0
        for index in indices:
            starts.append(at)
            at += -(-parameters[index].numel() // LINE) * LINE
        done.append((kind[0], -indices[-1], GradientBucket(tuple(indices), tuple(starts), at, *kind)))

    for index in reversed(range(len(parameters))):
        shard = shard_of(parameters[index])
        kind = (shard.replicated and shard.gradient == "partial", shard.spread, decays(parameters[index]))
        key = (units[index] if units is not None else 0, kind)
        open_runs.setdefault(key, []).append(index)
        if sum(parameters[i].numel() for i in open_runs[key]) * update_dtype(parameters[index].dtype).itemsize >= limit:
            close(key)
    for key in list(open_runs):
        close(key)
    return [bucket for _, _, bucket in sorted(done, key=lambda one: one[:2])]


class BucketLayout:
    """A rank's parameters in buckets, over whom each bucket is summed, and which range of it this rank keeps.

    With `zero` of 1 or more the ranks of a bucket's group keep a range each, [start, stop) in `ranges`; else each rank
    keeps all of it. `bucket_bytes` and `units` are those of `lay_out`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        groups: GradientGroups,
        zero: Zero = 0,
        bucket_bytes: int = BUCKET_BYTES,
        units: Sequence[int] | None = None,
    ) -> None:
        self.parameters, self.groups = list(parameters), groups
        self.zero: Zero = zero if groups.dp.size > 1 else 0
        self.buckets = lay_out(self.parameters, bucket_bytes, units)
        self.ranges = [self._range(number) for number in range(len(self.buckets))]
        self.bucket_of = {index: number for number, bucket in enumerate(self.buckets) for index in bucket.parameters}
        self._starts = {i: start for b in self.buckets for i, start in zip(b.parameters, b.starts, strict=True)}

    def group_of(self, number: int) -> Group:
        """The ranks over which a bucket is summed and, with `zero`, cut into ranges."""
        return self.groups.summing(self.buckets[number].spread)

    def spans(self, number: int) -> Iterator[ParameterSpan]:
        """What of each parameter lies in this rank's range of a bucket."""
        return spans(self.buckets[number], self.parameters, *self.ranges[number])

    def view(self, flat: Tensor, index: int) -> Tensor:
        """A parameter's part of its bucket's flat memory, in the parameter's shape."""
        parameter, start = self.parameters[index], self._starts[index]
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def _range(self, number: int) -> tuple[int, int]:
        bucket, group = self.buckets[number], self.group_of(number)
        return bucket.range_of(group.rank, group.size) if self.zero else (0, bucket.size)
