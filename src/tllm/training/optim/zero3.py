"""ZeRO-3: the weights of a layer are gathered while it is used, and sharded over dp in between (1910.02054,
2304.11277).

Forward and backward pass gather each unit's weights and let them go again; what was used next in the step before is
gathered ahead, while this one is used. So a rank's weights take its ranges and at most two units that follow one
another (a tied table on one stage counts to both ends); a rank receives (n - 1) / n of a unit for each use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tllm.core.errors import PlanError
from tllm.model.transformer import Transformer
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.objectives.hidden_state_loss import HiddenStateLoss
from tllm.training.optim.flat_parameters import FlatParameters


class Unit(NamedTuple):
    """A layer, or an end of the model: used from when `first` is called until `last` returns.

    `looked_up`: a table of which the backward pass reads no weight.
    """

    first: nn.Module
    last: nn.Module
    looked_up: bool = False

    def parameters(self) -> list[nn.Parameter]:
        return [*self.first.parameters(), *self.last.parameters()]


def units_of(trained: Sequence[nn.Module]) -> list[Unit]:
    """The units of a rank: each projection, and each chunk's in the order of the forward pass. Adapters have none."""
    units = list[Unit]()
    for model in trained:
        if isinstance(model, HiddenStateLoss):
            units += [Unit(projection, projection) for projection in model.projections]
        if not isinstance(model, Transformer):
            continue
        if model.is_first:
            units.append(Unit(model.embed_tokens, model.embed_tokens, looked_up=True))
        units += [Unit(layer, layer) for layer in model.layers.values()]
        if model.is_last:
            units.append(Unit(model.norm, model.score if model.spec.num_labels else model.lm_head))
    return units


def unit_numbers(units: Sequence[Unit], parameters: Sequence[nn.Parameter]) -> list[int]:
    """The unit of each parameter, the first of two that share one: what `BucketLayout` takes as `units`."""
    number_of: dict[int, int] = {}
    for number, unit in enumerate(units):
        for parameter in unit.parameters():
            number_of.setdefault(id(parameter), number)
    return [number_of[id(parameter)] for parameter in parameters]


class Zero3Gathering:
    """Watches the units of a rank and sees that the weights of each are there when it is used.

    Every rank of dp must use the same units in the same order, one after another: a layer's recomputation is a part
    of its backward pass. Outside of a step nothing is gathered ahead.
    """

    def __init__(self, units: Sequence[Unit], flat: FlatParameters, buckets: GradientBuckets) -> None:
        self.flat, self.buckets = flat, buckets
        self._of = [self._sharded_buckets(unit) for unit in units]
        self._there: list[Future[None] | None] = [None] * len(flat.whole)
        self._microbatches = 0
        self._expected: list[int] = []
        self._seen: list[int] | None = None
        for number, unit in enumerate(units):
            if self._of[number]:
                unit.first.register_forward_pre_hook(partial(self._before, number))
                unit.last.register_forward_hook(partial(self._after, number, unit.looked_up))

    def begin(self, microbatches: int) -> None:
        """Start a step. PlanError on every rank if they have unlike numbers of microbatches."""
        if not any(self._of):
            return
        self._agree(microbatches)
        if microbatches != self._microbatches:
            self._microbatches, self._expected = microbatches, []
        self._seen = []
        self._gather_next()

    def finish(self) -> None:
        """End a step, after its last backward pass."""
        if self._seen is not None:
            self._expected, self._seen = self._seen, None
        assert not any(self._there), "a unit is left that was not used to its end"

    def _before(self, number: int, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._use(number)
        x, *rest = inputs
        if not (torch.is_grad_enabled() and x.requires_grad):
            return None
        return _Passing.apply(x, partial(self._leave, number)), *rest  # type: ignore[no-untyped-call]

    def _after(self, number: int, looked_up: bool, _: nn.Module, __: object, out: Tensor) -> Tensor | None:
        self._leave(number)
        if looked_up or not out.requires_grad:
            return None
        return _Passing.apply(out, partial(self._use, number))  # type: ignore[no-any-return, no-untyped-call]

    def _use(self, number: int) -> None:
        """Return when a unit's weights are there."""
        self._start(number)
        for bucket in self._of[number]:
            there = self._there[bucket]
            assert there is not None
            there.result()
        if self._seen is not None:
            assert self._next() in (None, number), "a step uses the units in the order of the step before"
            self._seen.append(number)
            self._gather_next()

    def _leave(self, number: int) -> None:
        """Let a unit's weights go, but for those that are used next."""
        following = self._next()
        wanted = () if following is None else self._of[following]
        for bucket in self._of[number]:
            if bucket not in wanted:
                self._there[bucket] = None
                self.flat.free(bucket)

    def _gather_next(self) -> None:
        following = self._next()
        if following is not None:
            self._start(following)

    def _next(self) -> int | None:
        """The unit to be used next in this step, as far as the last one tells."""
        if self._seen is None or len(self._seen) >= len(self._expected):
            return None
        return self._expected[len(self._seen)]

    def _start(self, number: int) -> None:
        for bucket in self._of[number]:
            if self._there[bucket] is None:
                self.flat.allocate(bucket)
                self._there[bucket] = self.buckets.run_in_order(partial(self.flat.gather, bucket))

    def _sharded_buckets(self, unit: Unit) -> list[int]:
        """The buckets that a unit's parameters lie in, in order, where they are not on this rank as a whole."""
        mine = {id(parameter) for parameter in unit.parameters()}
        return [
            number
            for number, bucket in enumerate(self.flat.layout.buckets)
            if self.flat.is_sharded(number)
            and any(id(self.flat.layout.parameters[i]) in mine for i in bucket.parameters)
        ]

    def _agree(self, microbatches: int) -> None:
        counts = self.buckets.run_in_order(partial(self._counts, microbatches)).result()
        if len(set(counts)) > 1:
            raise PlanError(
                f"zero=3 gathers each layer's weights from all {len(counts)} ranks of dp at once, which have "
                f"{', '.join(map(str, counts))} microbatches",
                "give dp equal shares that divide the microbatches of a step, or take zero=2",
            )

    def _counts(self, microbatches: int) -> list[int]:
        dp = self.flat.layout.groups.dp
        counts = dp.all_gather(torch.tensor([microbatches]), [(1,)] * dp.size)
        return [int(count) for count in counts]


class _Passing(torch.autograd.Function):
    """x as it is; `then` is called when its gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return gradient, None
