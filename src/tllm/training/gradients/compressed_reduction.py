"""Sums over ranks in fewer bytes: `Bf16Reduction` and `Int8Reduction`, each a `Reduction`.

Like the exact sum they take two hops: each rank sums its own range of a bucket, then sends the sum to every other. With
S elements, n ranks and b bytes an element, a rank sends 2 (n - 1) / n S b bytes (half with ZeRO, the second hop away):

    exact 4        bf16 2        int8 1 + 4/256, and 4 for what is not a matrix or is held by other ranks too
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.training.gradients.error_feedback import Residuals, lossy_parameters
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.reduction import GradientGroups, StatelessReduction
from tllm.training.state.tensor_blocks import StateSlice, TensorBlock

Span = tuple[int, int]

BLOCK = 256
"""Elements in a row that share one scale."""


class Bf16Reduction(StatelessReduction):
    """Sends bfloat16, adds in float32 and rounds the sum to bfloat16. Element by element, so the same however cut."""

    def all_reduce(self, number: int, run: Tensor, group: Group) -> Tensor:
        return run if group.size == 1 else run.copy_(group.all_reduce(run.bfloat16()))

    def reduce_scatter(self, number: int, run: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        return group.reduce_scatter(run.bfloat16(), counts).to(run)


class Int8Reduction:
    """Sends matrices in blocks of 8-bit integers with one scale each, and what rounding lost with the next step's.

    Error feedback as in 1809.07599, on both hops: a rank keeps what it did not send to the owner of a range; the owner
    adds up its range, its own part unrounded, and keeps what it did not send back. With ZeRO the numbers are the same.
    """

    def __init__(self, buckets: GradientBuckets, groups: GradientGroups | None = None) -> None:
        self.layout = buckets.layout
        self.residuals = Residuals(buckets.layout, groups or buckets.layout.groups)
        self._lossy = lossy_parameters(buckets)
        self._forms: dict[tuple[int, int], list[CompressedLayout]] = {}

    def all_reduce(self, number: int, run: Tensor, group: Group) -> Tensor:
        if group.size == 1:
            return self.residuals.settle(number, run)
        forms = self._forms_of(number, group.size)
        parts = group.all_gather(self._sum(number, run, group), [(form.nbytes(run.dtype),) for form in forms])
        for form, part in zip(forms, parts, strict=True):
            run[form.start : form.stop] = form.unpack(part, run)
        return run

    def reduce_scatter(self, number: int, run: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        form = self._forms_of(number, group.size)[group.rank]
        assert list(counts) == self.layout.buckets[number].counts(group.size), "ranges are those of the bucket"
        return form.unpack(self._sum(number, run, group), run)

    def consolidate(self) -> None:
        """Before a save: see `Residuals.consolidate`."""
        self.residuals.consolidate()

    def checkpoint_slices(self) -> Iterator[StateSlice]:
        return self.residuals.checkpoint_slices()

    def replica_slices(self) -> Iterator[StateSlice]:
        return self.residuals.replica_slices()

    def layout_bound_blocks(self) -> Iterator[TensorBlock]:
        return iter(())

    @property
    def nbytes(self) -> int:
        return self.residuals.nbytes

    def _sum(self, number: int, run: Tensor, group: Group) -> Tensor:
        """This rank's range of the sum, packed. `run` is overwritten."""
        forms, kept = self._forms_of(number, group.size), self.residuals.of(number)
        own = forms[group.rank]
        run.add_(kept)
        sends = {peer: form.pack(run[form.start : form.stop]) for peer, form in enumerate(forms) if peer != group.rank}
        recvs = {peer: torch.empty(own.nbytes(run.dtype), dtype=torch.uint8) for peer in sends}
        for peer, sent in sends.items():
            part = slice(forms[peer].start, forms[peer].stop)
            torch.sub(run[part], forms[peer].unpack(sent, run), out=kept[part])
        group.exchange(sends, recvs)
        mine = slice(own.start, own.stop)
        total = torch.zeros_like(run[mine])
        for peer in range(group.size):
            total += run[mine] if peer == group.rank else own.unpack(recvs[peer], run)
        message = own.pack(total)
        torch.sub(total, own.unpack(message, run), out=kept[mine])
        return message

    def _forms_of(self, number: int, ranks: int) -> list[CompressedLayout]:
        """How each rank's range of a bucket is written."""
        if (number, ranks) not in self._forms:
            bucket, blocked, exact = self.layout.buckets[number], list[Span](), list[Span]()
            for index, start in zip(bucket.parameters, bucket.starts, strict=True):
                spans = blocked if index in self._lossy else exact
                spans.append((start, start + self.layout.parameters[index].numel()))
            self._forms[number, ranks] = [
                CompressedLayout(start, stop, _within(blocked, start, stop), _within(exact, start, stop))
                for start, stop in (bucket.range_of(rank, ranks) for rank in range(ranks))
            ]
        return self._forms[number, ranks]


@dataclass(frozen=True)
class CompressedLayout:
    """How elements [start, stop) of a bucket are written: `exact` spans as they are, then scales, then 8-bit blocks.

    Spans count from `start`; what is in none reads as 0. A block ends where its span does, so that no parameter sets
    another one's scale.
    """

    start: int
    stop: int
    blocked: tuple[Span, ...]
    exact: tuple[Span, ...]

    @property
    def blocks(self) -> int:
        return sum(_blocks(b - a) for a, b in self.blocked)

    @property
    def plain(self) -> int:
        """Elements that are sent as they are."""
        return sum(b - a for a, b in self.exact)

    def nbytes(self, dtype: torch.dtype) -> int:
        """The length of a message."""
        return self.plain * dtype.itemsize + self.blocks * (dtype.itemsize + BLOCK)

    def pack(self, x: Tensor) -> Tensor:
        """The range as a message. A block with a number that is not finite has such a scale: it does not go unseen."""
        filled = [F.pad(x[a:b], (0, _blocks(b - a) * BLOCK - (b - a))) for a, b in self.blocked]
        rows = torch.cat([x.new_empty(0), *filled]).view(-1, BLOCK)
        scale = rows.abs().amax(1) / 127
        steps = (rows / torch.where(scale > 0, scale, 1)[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        plain = torch.cat([x.new_empty(0), *(x[a:b] for a, b in self.exact)])
        return torch.cat([plain.view(torch.uint8), scale.view(torch.uint8), steps.view(torch.uint8).flatten()]).cpu()

    def unpack(self, message: Tensor, like: Tensor) -> Tensor:
        """The range that a message says, as a tensor of this dtype and device."""
        size, message = like.dtype.itemsize, message.to(like.device)
        plain, scale, steps = torch.split(message, [self.plain * size, self.blocks * size, self.blocks * BLOCK])
        rows = steps.view(torch.int8).view(-1, BLOCK) * scale.view(like.dtype)[:, None]
        out = like.new_zeros(self.stop - self.start)
        _lay(rows.flatten(), self.blocked, out, BLOCK)
        _lay(plain.view(like.dtype), self.exact, out, 1)
        return out


def _within(spans: Sequence[Span], start: int, stop: int) -> tuple[Span, ...]:
    """The parts of spans that are in [start, stop), counted from there."""
    met = [(max(a, start) - start, min(b, stop) - start) for a, b in spans]
    return tuple((a, b) for a, b in met if a < b)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _lay(numbers: Tensor, spans: Sequence[Span], out: Tensor, unit: int) -> None:
    """Numbers into the spans of `out`, those of each span from a multiple of `unit` on."""
    at = 0
    for a, b in spans:
        out[a:b] = numbers[at : at + b - a]
        at += -(-(b - a) // unit) * unit
