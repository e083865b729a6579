"""Gradient clipping by the norm over the whole mesh, in which each element counts once; and what follows if that norm
is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group, solo
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.non_finite import (
    LOSS,
    OWN,
    SUMMED,
    WEIGHT,
    NonFiniteFound,
    agree,
    bad_blocks,
    bad_names,
    error_of,
    places_of,
)
from tllm.training.state.tensor_blocks import StateSlice, TensorBlock, optimizer_blocks

Span = tuple[int, int]

RUN = 16 * 1024
"""Elements whose squares are added at once, in the gradient's own dtype unless it is `deterministic`."""

RUN_OF_GPU = 4 * 1024 * 1024
"""The same where each call is a launch, and its many threads add up runs that are no longer."""

WORD = 62
"""Bits of an int64 that sums of integers may fill."""


class GradientNorm:
    """Which elements of each bucket this rank counts: those that no lower rank of its replica holds too.

    `rank` is this rank's number in the plan. With `deterministic` the norm is the same to the bit however elements are
    cut and ordered: of the squares of N < 2^n elements, relative to the largest power of 4 above them, 2 (62 - n) bits
    are added as integers, which changes the norm by 2^(3 n - 124) of itself at most: 6e-11 with a billion elements.
    """

    def __init__(self, buckets: GradientBuckets, rank: int = 0, deterministic: bool = False) -> None:
        self.buckets, self.rank, self._layout = buckets, rank, buckets.layout
        elsewhere = buckets.replicas.counted_elsewhere()
        self._counted = []
        for bucket, (start, stop) in zip(self._layout.buckets, self._layout.ranges, strict=True):
            spans: list[Span] = []
            for index, at in zip(bucket.parameters, bucket.starts, strict=True):
                spans += [(at + a, at + b) for a, b in _kept(self._layout.parameters[index].shape, elsewhere[index])]
            within = [(max(a, start) - start, min(b, stop) - start) for a, b in _joined(spans)]
            self._counted.append([(a, b) for a, b in within if a < b])
        self._norm = self._in_integers if deterministic else self._in_floats
        self._bits = WORD - self._elements().bit_length() if deterministic else 0

    def norm(self, loss: float = 0.0) -> float:
        """The square root of the sum of squares over the whole model, the same on every rank.

        It is not finite where the `loss` of any rank is not.
        """
        return self._norm(loss)

    def clip(self, limit: float, loss: float = 0.0) -> float:
        """Scale the gradient down to a norm of `limit` where it is larger; returns the norm before. 0 does not clip.

        A gradient whose norm is not finite stays as it is, for `check` to find where it went bad.
        """
        norm = self.norm(loss)
        if 0 < limit < norm < math.inf:
            for number in range(len(self._counted)):
                self.buckets.reduced(number).mul_(limit / norm)
        return norm

    def check(
        self,
        step: int,
        norm: float,
        loss: float = 0.0,
        weights: Callable[[], Iterable[TensorBlock]] = tuple,
        others: Group | None = None,
        late: int = 0,
    ) -> None:
        """NonFiniteError on every rank where the norm is not finite; it names the step, and what was not finite where.

        `loss` is this rank's, `weights` gives all that it holds of the model. Only the first cause is named: a weight,
        else a loss, else the first gradient in the model's order, with the rank that had it before the sum. `others`
        are the ranks whose gradients are summed in another way than over the buckets' groups (on servers). The gradient
        is of `late` steps before.
        """
        if math.isfinite(norm):
            return
        groups = (others or solo(), self._layout.groups.dp, self.buckets.replicas.group)
        raise error_of(step, norm, agree(self._bad(loss, weights), groups), late)

    def _in_floats(self, loss: float) -> float:
        totals = [torch.full((1,), 0.0 * loss, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
        if not self._layout.zero:  # then elements are not summed over dp, and a loss that is not finite must reach all
            self._layout.groups.dp.all_reduce(totals[False])
        runs: list[list[Tensor]] = [[], []]
        for spread, run in self._runs():
            runs[spread].append(run)
        for total, some in zip(totals, runs, strict=True):
            if some:
                total += _sum_of_squares(some).cpu()
        return math.sqrt(self._over_mesh(*totals).item())

    def _in_integers(self, loss: float) -> float:
        """Each square as two integers, of which the second counts what is left of the first, 2^bits times smaller."""
        largest = self._largest(loss)
        if largest == 0 or not math.isfinite(largest):
            return largest
        exponent = max(math.frexp(largest)[1], -1022)
        totals = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
        for spread, run in self._runs():
            squares = (run.double() * 2.0**-exponent).square_() * 2.0**self._bits
            whole = squares.floor()
            rest = squares.sub_(whole).mul_(2.0**self._bits).round_()
            totals[spread] += torch.stack((whole.long().sum(), rest.long().sum())).cpu()
        high, low = self._over_mesh(*totals).tolist()
        return math.ldexp(math.sqrt((high << self._bits) + low), exponent - self._bits)

    def _largest(self, loss: float) -> float:
        """The largest element of the whole gradient, by size."""
        largest = torch.full((1,), 0.0 * loss, dtype=torch.float64)
        for _, run in self._runs():
            largest = torch.maximum(largest, run.abs().amax().double().cpu())
        for group in (self._layout.groups.dp, self.buckets.replicas.group):
            largest = torch.cat(group.all_gather(largest, [(1,)] * group.size)).amax(0, keepdim=True)
        return largest.item()

    def _elements(self) -> int:
        """How many elements the whole model has."""
        totals = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        for bucket, spans in zip(self._layout.buckets, self._counted, strict=True):
            totals[bucket.spread] += sum(stop - start for start, stop in spans)
        return int(self._over_mesh(*totals).item())

    def _over_mesh(self, ordinary: Tensor, spread: Tensor) -> Tensor:
        """The sum over the mesh of what each rank counted in ordinary buckets, and in those of spread experts."""
        groups = self._layout.groups
        if self._layout.zero:
            groups.dp.all_reduce(ordinary)
            groups.edp.all_reduce(spread)
        return self.buckets.replicas.group.all_reduce(ordinary + groups.ep.all_reduce(spread))

    def _runs(self) -> Iterator[tuple[bool, Tensor]]:
        """The elements that this rank counts, in short pieces; for each whether it is of experts spread over ep."""
        for number, spans in enumerate(self._counted):
            reduced = self.buckets.reduced(number)
            for start, stop in spans:
                for run in torch.split(reduced[start:stop], RUN_OF_GPU if reduced.is_cuda else RUN):
                    yield self._layout.buckets[number].spread, run

    def _bad(self, loss: float, weights: Callable[[], Iterable[TensorBlock]]) -> list[NonFiniteFound]:
        """All that is not finite on this rank."""
        places = places_of(self._layout.parameters)
        summed = [name for number in range(len(self._counted)) for name in bad_names(self._held(number))]
        return [
            *bad_blocks(WEIGHT, bad_names(weights()), places, self.rank),
            *([] if math.isfinite(loss) else [NonFiniteFound(LOSS, (0, 0), self.rank, str(loss))]),
            *bad_blocks(OWN, self.buckets.non_finite_names, places, self.rank),
            *bad_blocks(SUMMED, summed, places, self.rank),
        ]

    def _held(self, number: int) -> list[TensorBlock]:
        """What this rank holds of a bucket's gradient, by the checkpoint's names."""
        reduced, held = self.buckets.reduced(number), self._layout.spans(number)
        return optimizer_blocks(StateSlice(parameter, "", start, reduced[place]) for parameter, start, place in held)


def _sum_of_squares(runs: list[Tensor]) -> Tensor:
    """Of all elements, in float64."""
    if runs[0].is_cuda:
        return of_norms(runs)
    # Products of short runs, added up in float64: as exact as float64 throughout, and 25 times as fast.
    return torch.stack([torch.dot(run, run) for run in runs]).double().sum()


def of_norms(runs: list[Tensor]) -> Tensor:
    """The same from each run's norm, which GPUs work out for all of them at once."""
    return torch.stack(torch._foreach_norm(runs)).double().square().sum()


def _kept(shape: torch.Size, skipped: Sequence[tuple[slice, ...]]) -> list[Span]:
    """Runs of elements of a parameter that are in none of these places."""
    if not skipped:
        return [(0, shape.numel())]
    kept = torch.ones(shape, dtype=torch.int8)
    for place in skipped:
        kept[place] = 0
    edges = torch.diff(torch.nn.functional.pad(kept.reshape(-1), (1, 1)))
    starts, stops = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _joined(spans: list[Span]) -> list[Span]:
    """The same elements in as few runs as can be."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
