"""`HeldOut`: rows that are evaluated and never learned, kept by each rank as its forward passes take them."""

from __future__ import annotations

import math

import msgspec
import torch

from tllm.core.errors import ConfigError
from tllm.training.data.batch_feed import ReplicaBatch
from tllm.training.data.batches import Batches
from tllm.training.evaluation.completion_record import CompletionRecord
from tllm.training.evaluation.divergence_estimate import BeforePasses
from tllm.training.evaluation.forward_rows import MICROBATCHES, ForwardFeed
from tllm.training.job.job import Job
from tllm.training.objectives.objective import MetricSum
from tllm.training.step.rank_groups import RankConfig
from tllm.training.step.rank_model import RankModel


class Evaluated(msgspec.Struct, frozen=True):
    """The loss of the rows held out, if the task has one of them, and metrics by name: means over all of them.

    `perplexity` is exp(loss), where the loss is a mean of -log p over tokens; inf beyond what a float holds. On rank 0
    `completions` are some to be read. A `fault` says, with a hint, why there is nothing. What rank 0
    alone can evaluate it tells the others, as msgpack (`EVALUATIONS`). All of it took `seconds` on this rank.
    """

    loss: float | None = None
    metrics: dict[str, float] = {}
    perplexity: float | None = None
    completions: tuple[CompletionRecord, ...] = ()
    fault: tuple[str, str] | None = None
    seconds: float | None = None

    @property
    def told(self) -> dict[str, float]:
        """Its numbers by name."""
        whole = {"loss": self.loss, "perplexity": self.perplexity}
        return {name: value for name, value in whole.items() if value is not None} | self.metrics

    def joined(self, other: Evaluated) -> Evaluated:
        """With what another part of the evaluation told."""
        metrics, completions = self.metrics | other.metrics, (*self.completions, *other.completions)
        return Evaluated(self.loss, metrics, self.perplexity, completions, self.fault or other.fault)


EVALUATIONS = msgspec.msgpack.Decoder(Evaluated)


class HeldOut:
    """Every rank makes the same calls. `batches` are rank 0's, who reads the rows and sends each its part, once."""

    def __init__(self, config: RankConfig, model: RankModel, before: BeforePasses, batches: Batches | None) -> None:
        self._groups, self._model, self._before = config.groups, model, before
        self._has_perplexity = has_perplexity(config.job)
        feed = ForwardFeed(config.plan, config.groups.data, config.job.microbatch_size, MICROBATCHES)
        self._parts: list[ReplicaBatch] = []
        if batches is None:
            self._parts += feed.receive()
        else:
            step, size = 0, feed.rows_at_once
            while rows := batches.step(step):
                self._parts += [feed.send(rows[at : at + size]) for at in range(0, len(rows), size)]
                step += 1
            feed.end()
        self._denominator = sum(part.denominator for part in self._parts)
        if not self._denominator:
            raise ConfigError(
                "nothing of the rows in eval_files is predicted, so that they have no loss",
                "see that replies find room in seq_len after their prompts, and are not all labelled -100",
            )

    def evaluate(self) -> Evaluated:
        """The loss and metrics with the weights that the model has now, alike on every rank."""
        names = self._model.objective.metric_names
        result = self._model.forward_only(self._before([one for part in self._parts for one in part.unpack()]))
        speaks = self._groups.tells_losses
        metrics = [result.metrics.get(name, MetricSum(0.0, 0.0)) for name in names]
        mine = [result.loss_sum, *(number for found in metrics for number in (found.total, found.count))]
        sums = self._groups.world.all_reduce(torch.tensor(mine, dtype=torch.float64) * speaks).tolist()
        means = [total / count if count else 0.0 for total, count in zip(sums[1::2], sums[2::2], strict=True)]
        loss = sums[0] / self._denominator
        perplexity = perplexity_of(loss) if self._has_perplexity else None
        return Evaluated(loss, dict(zip(names, means, strict=True)), perplexity)


def has_perplexity(job: Job) -> bool:
    """Whether the loss of rows held out is a mean of -log p over tokens."""
    return job.task == "sft"


def perplexity_of(loss: float) -> float:
    """exp(loss); inf where no float is so large."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
