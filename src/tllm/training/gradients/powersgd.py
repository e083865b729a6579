"""`PowerSGD`: sums a matrix by a low-rank approximation of r columns and r rows (1905.13727), as a `Reduction`.

A rank's matrix M_i (its gradient and what it has not sent yet) is summed as

    P = sum_i M_i Q      P made orthonormal      Q = sum_i M_i^T P      sum_i M_i ~ P Q^T      kept: M_i - P (M_i^T P)^T

where Q begins at random and then is what the step before left. An m x n matrix costs r (m + n) numbers instead of m n;
what is not a matrix, is too small to gain, or is held by other ranks too is sent as it is, with P.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.parallel.shard import shard_of
from tllm.training.data.seeds import key_for
from tllm.training.gradients.error_feedback import Residuals, lossy_parameters
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.reduction import GradientGroups
from tllm.training.state.tensor_blocks import StateSlice, TensorBlock, blocks_of, update_dtype
from tllm.weights.boxes import show, whole

RIGHT = "columns"
"""The state's name of Q."""

LOST = 1e-6
"""A column that shrinks to this part of itself beside the others holds only rounding of float32."""


class PowerSGD:
    """Sums of rank `rank`, with error feedback. torch's own hook needs torch.distributed under it and one whole DDP."""

    def __init__(self, buckets: GradientBuckets, rank: int, groups: GradientGroups | None = None) -> None:
        self.layout, self.rank = buckets.layout, rank
        self.residuals = Residuals(buckets.layout, groups or buckets.layout.groups)
        self._low = {
            index for index in lossy_parameters(buckets) if self._gains(buckets.layout.parameters[index].shape)
        }
        self._starts: dict[int, Tensor] = {}

    def all_reduce(self, number: int, run: Tensor, group: Group) -> Tensor:
        if group.size == 1:
            return self.residuals.settle(number, run)
        kept = self.residuals.of(number)
        run.add_(kept)
        numbers = self.layout.buckets[number].parameters
        views, kept_views = self._views(number, run), self._views(number, kept)
        low, plain = [i for i in numbers if i in self._low], [i for i in numbers if i not in self._low]

        sums = _sum([views[i] @ self._start(i) for i in low] + [views[i] for i in plain], group)
        lefts = _each_orthonormal(sums[: len(low)])
        mine = [views[i].mT @ p for i, p in zip(low, lefts, strict=True)]
        rights = _sum(mine, group) if mine else []
        for i, p, q, own in zip(low, lefts, rights, mine, strict=True):
            torch.sub(views[i], p @ own.mT, out=kept_views[i])
            views[i].copy_(product(p, q))
            self._starts[i].copy_(q)
        for i, total in zip(plain, sums[len(low) :], strict=True):
            views[i].copy_(total)
            kept_views[i].zero_()  # what another layout, where it is cut otherwise, had left
        return run

    def reduce_scatter(self, number: int, run: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        return torch.split(self.all_reduce(number, run, group), list(counts))[group.rank]

    def consolidate(self) -> None:
        """Before a save: as `Residuals.consolidate`, and Q begins anew, since no other layout could go on with it."""
        self.residuals.consolidate()
        for index, start in self._starts.items():
            start.copy_(self._random(index))

    def checkpoint_slices(self) -> Iterator[StateSlice]:
        return self.residuals.checkpoint_slices()

    def replica_slices(self) -> Iterator[StateSlice]:
        return self.residuals.replica_slices()

    def layout_bound_blocks(self) -> Iterator[TensorBlock]:
        """Q of each matrix, named after the first piece of the checkpoint that the matrix is of."""
        for index in sorted(self._low):
            parameter, start = self.layout.parameters[index], self._start(index)
            first = blocks_of(shard_of(parameter), torch.empty(parameter.shape, device="meta"))[0]
            yield TensorBlock(f"{RIGHT}/{first.name}{show(first.box)}", whole(tuple(start.shape)), start)

    @property
    def nbytes(self) -> int:
        return self.residuals.nbytes

    def _start(self, index: int) -> Tensor:
        """Q, of a parameter: [..., n, r]."""
        if index not in self._starts:
            self._starts[index] = self._random(index)
        return self._starts[index]

    def _random(self, index: int) -> Tensor:
        """Q as it begins."""
        parameter = self.layout.parameters[index]
        like = torch.empty(0, dtype=update_dtype(parameter.dtype), device=parameter.device)
        columns = random_columns(parameter.shape[-1], self.rank, like)
        return columns.expand(*parameter.shape[:-2], *columns.shape).clone()

    def _views(self, number: int, run: Tensor) -> dict[int, Tensor]:
        bucket = self.layout.buckets[number]
        return dict(zip(bucket.parameters, bucket.views(run, self.layout.parameters), strict=True))

    def _gains(self, shape: torch.Size) -> bool:
        """Whether columns and rows are fewer numbers than all."""
        return self.rank * sum(shape[-2:]) < math.prod(shape[-2:])


def _sum(parts: list[Tensor], group: Group) -> list[Tensor]:
    """Each tensor's sum over the group, all in one message."""
    flat = group.all_reduce(torch.cat([part.flatten() for part in parts]))
    split = torch.split(flat, [part.numel() for part in parts])
    return [total.view(part.shape) for total, part in zip(split, parts, strict=True)]


def _each_orthonormal(parts: list[Tensor]) -> list[Tensor]:
    """Those of one shape together: it takes many short operations."""
    made = dict[int, Tensor]()
    for shape in {part.shape: None for part in parts}:
        same = [number for number, part in enumerate(parts) if part.shape == shape]
        made.update(zip(same, orthonormal(torch.stack([parts[number] for number in same])), strict=True))
    return [made[number] for number in range(len(parts))]


# What follows must have the same bits on unlike processors, or replicas would drift apart: it is made of additions and
# products element by element, never of a matrix product or a library's sum, whose order is the processor's own.


def product(p: Tensor, q: Tensor) -> Tensor:
    """p q^T: [..., m, r] and [..., n, r] -> [..., m, n]."""
    out = p[..., :, None, 0] * q[..., None, :, 0]
    for column in range(1, p.shape[-1]):
        out += p[..., :, None, column] * q[..., None, :, column]
    return out


def orthonormal(p: Tensor) -> Tensor:
    """Columns [..., m, r] that span what those of `p` do, by Gram-Schmidt, twice, in float64.

    One that adds nothing to those before it (of a gradient of zeros, or of few tokens) gives way to a random one: what
    is zero once would stay so.
    """
    columns, spare = p.mT.double(), random_columns(p.shape[-2], p.shape[-1], p).double()
    sizes = _dot(columns, columns)
    done = columns[..., :0, :]
    for number in range(p.shape[-1]):
        rest = _without(columns[..., number, :], done)
        lost = _dot(rest, rest) <= LOST**2 * sizes[..., number, :]
        rest = _without(torch.where(lost, spare[:, number], rest), done)
        done = torch.cat([done, (rest / _dot(rest, rest).sqrt())[..., None, :]], -2)
    return done.mT.to(p.dtype)


def random_columns(rows: int, columns: int, like: Tensor) -> Tensor:
    """[rows, columns] of numbers in [-1/2, 1/2), always the same."""
    dice = torch.Generator().manual_seed(key_for("powersgd", rows, columns) >> 1)
    return (torch.rand(rows, columns, generator=dice) - 0.5).to(like)


def _without(column: Tensor, done: Tensor) -> Tensor:
    """A column [..., m] less what it has of the orthonormal ones [..., k, m]."""
    parts = _dot(done, column[..., None, :]) if done.shape[-2] else done
    for number in range(done.shape[-2]):
        column = column - parts[..., number, :] * done[..., number, :]
    return column


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The sum along the last dim, kept with width 1, in pairs of halves."""
    products = a * b
    x = F.pad(products, (0, (1 << (products.shape[-1] - 1).bit_length()) - products.shape[-1]))
    while x.shape[-1] > 1:
        left, right = x.chunk(2, -1)
        x = left + right
    return x
