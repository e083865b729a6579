"""`Objective`: what a run learns from the last stage's hidden states. Each task has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from tllm.model.transformer import Transformer
from tllm.training.data.batch_tensors import Tokens


@dataclass(frozen=True)
class MetricSum:
    """A metric's sum over what it is a mean of (tokens, documents, pairs), and how many of these there were."""

    total: float
    count: float


LARGEST, SMALLEST = "/max", "/min"
"""What the names of metrics end with that are not means, but the largest or smallest: the `total`, with a count of 1
where there is one."""


def joined(name: str, parts: Sequence[MetricSum]) -> MetricSum:
    """A metric of several microbatches, or of several ranks."""
    totals = [part.total for part in parts if part.count]
    if totals and name.endswith((LARGEST, SMALLEST)):
        return MetricSum(max(totals) if name.endswith(LARGEST) else min(totals), 1.0)
    return MetricSum(sum(part.total for part in parts), sum(part.count for part in parts))


def all_joined(parts: Sequence[Mapping[str, MetricSum]]) -> dict[str, MetricSum]:
    """Every metric that any of several microbatches, or of their hidden states, has."""
    names = dict.fromkeys(name for one in parts for name in one)
    return {name: joined(name, [one[name] for one in parts if name in one]) for name in names}


@dataclass(frozen=True)
class MicrobatchLoss:
    """The loss of one microbatch, a sum that the step's denominator divides, and what else is told of it.

    `loss` is a scalar to be differentiated on every rank. `reported` is this rank's part of what is summed over the
    ranks that share the microbatch's tokens (cp); left out, it is `loss`, as where each has the losses of its tokens.
    """

    loss: Tensor
    reported: Tensor | None = None
    metrics: Mapping[str, MetricSum] = field(default_factory=dict)


class Objective(Protocol):
    """(the last chunk's model, its hidden_TD, tokens) -> the loss of the microbatch.

    Every rank has one, also those that never call it, and knows by it the names of the metrics.
    """

    @property
    def metric_names(self) -> tuple[str, ...]: ...

    def __call__(self, model: Transformer, x_TD: Tensor, tokens: Tokens) -> MicrobatchLoss: ...
