"""`Objective`: what a run learns from the last stage's hidden states, as the tasks of a job say."""

from __future__ import annotations

from collections.abc import Mapping
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
