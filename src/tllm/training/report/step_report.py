"""Makes a step's record from the counters of all ranks, which one short all-gather brings together."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tllm.comm.collectives.group import Group, solo
from tllm.devices.memory import peak_memory
from tllm.planner.cost.flops import training_flops
from tllm.training.data.batch_feed import ReplicaBatch
from tllm.training.data.batch_tensors import Tokens
from tllm.training.evaluation.held_out import Evaluated
from tllm.training.gradients.accumulation_order import exact_sum
from tllm.training.job.target_modules import lowest_learned_layer
from tllm.training.objectives.objective import MetricSum, joined
from tllm.training.report.metrics import StepRecord
from tllm.training.step.pipeline_step import StepResult
from tllm.training.step.rank_groups import RankConfig
from tllm.training.step.shared_prompts import as_computed

log = logging.getLogger("tllm.training")

FIRST_METRIC = 8
"""Of the numbers that a rank tells of a step, the first of its objective's metrics: two of each."""


@dataclass(frozen=True)
class RankCounters:
    """What one rank knows of a step that is done, of whose `batch` its replica had these `microbatches`. `start` is
    when it began, by the monotonic clock.

    `reason` says why evaluations end the run after it, if they do.
    """

    batch: ReplicaBatch
    microbatches: Sequence[Tokens]
    result: StepResult
    grad_norm: float
    learning_rate: float
    start: float
    load_balance_loss: float | None = None
    evaluated: Evaluated | None = None
    reason: str = ""
    role_seconds: Mapping[str, float] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)


class StepReport:
    """Makes the records of a run's steps. `peak`: the flop/s that this rank's matrix products reach, and once it is
    made, those of all ranks together.

    `metric_names` are those of the run's objective, alike on every rank.
    """

    def __init__(self, config: RankConfig, peak: float, metric_names: Sequence[str] = ()) -> None:
        self._config, self._metric_names, self._device = config, metric_names, config.device
        self._groups, self._pipelined = config.groups, config.plan.pp > 1
        self._counts = config.groups.tells_losses
        self._forward_only = lowest_learned_layer(config.job, config.spec)
        self._sent = 0
        self._own_peak = peak
        self._knows_peak = True
        self.peak = float(_gathered(config.groups.world, [peak]).sum())

    def record(self, step: int, counters: RankCounters, stopped: bool) -> tuple[StepRecord, bool]:
        """The record of step `step`, alike on every rank, and whether any rank was stopped."""
        return self._made(step, counters, stopped, counters.batch, self._groups.world, self.peak)

    def record_alone(self, step: int, counters: RankCounters) -> StepRecord:
        """The record of this rank's own rows, where ranks do not meet. Only that of rank 0 is reported."""
        sent, batch = self._sent, counters.batch.as_global_batch()
        record, _ = self._made(step, counters, False, batch, solo(), self._own_peak)
        self._sent = self._sent if self._groups.world.rank == 0 else sent
        return record

    def _made(
        self, step: int, counters: RankCounters, stopped: bool, batch: ReplicaBatch, ranks: Group, peak: float
    ) -> tuple[StepRecord, bool]:
        """The record of `ranks`, who have computed `batch` together, and whether any of them was stopped."""
        sent = self._groups.bytes_sent
        result = counters.result
        losses = [result.loss_sum, result.loss_rest] if self._counts else [0.0, 0.0]
        mine = [
            *losses,
            sent - self._sent,
            peak_memory(self._device),
            result.waited,
            float(stopped),
            counters.load_balance_loss or 0.0,
            float(self._flops(counters.microbatches)),
            *(number for name in self._metric_names for number in self._metric(name, result)),
        ]
        self._sent = sent
        each = _gathered(ranks, mine)
        loss_sum, _ = exact_sum(each[:, :2].flatten().tolist())
        bytes_sent, _, waited, stop, balance, flops = each[:, 2:FIRST_METRIC].sum(0).tolist()
        seconds = seconds_since(counters.start)
        record = StepRecord(
            step=step,
            loss=loss_sum / (batch.denominator or 1.0),
            grad_norm=counters.grad_norm,
            learning_rate=counters.learning_rate,
            tokens=batch.tokens,
            seconds=seconds,
            tokens_per_second=batch.tokens / seconds,
            mfu=self._mfu(flops / seconds, peak),
            bubble=waited / (len(each) * seconds) if self._pipelined else None,
            memory=int(each[:, 3].max()),
            bytes_sent=round(bytes_sent),
            aux_loss=None
            if counters.load_balance_loss is None
            else balance * counters.batch.global_microbatches / max(batch.global_microbatches, 1),
            metrics={
                **batch.metrics,
                **{
                    name: whole.total / whole.count if whole.count else 0.0
                    for name, whole in zip(self._metric_names, self._joined(each), strict=True)
                },
            }
            or None,
            eval_loss=None if counters.evaluated is None else counters.evaluated.loss,
            eval_metrics=None if counters.evaluated is None else counters.evaluated.metrics or None,
            eval_perplexity=None if counters.evaluated is None else counters.evaluated.perplexity,
            eval_seconds=None if counters.evaluated is None else counters.evaluated.seconds,
            early_stopping=counters.reason or None,
            role_seconds=dict(counters.role_seconds) or None,
            predicted_seconds=dict(counters.predicted) or None,
        )
        return record, stop > 0

    def _mfu(self, reached: float, peak: float) -> float | None:
        """Model flops utilization, by the flop/s that a step reached. None from the first step on that reaches more
        than the peak: no step can, so that the peak is higher, and the shares that were told before too high."""
        if self._knows_peak and reached > peak:
            self._knows_peak = False
            if self._groups.world.rank == 0:
                log.warning(
                    "a step reached %.3g Gflop/s, and the peak of all ranks was measured as %.3g: other programs ran "
                    "then. No MFU is told from here on, and those before are too high",
                    reached / 1e9,
                    peak / 1e9,
                )
        return reached / peak if self._knows_peak else None

    def _flops(self, batch: Sequence[Tokens]) -> int:
        """Of the whole model for what a replica learns from, forward and backward, as it computes it. All ranks of the
        replica know these microbatches, and the first tells."""
        if self._config.rank % self._config.plan.replica_size:
            return 0
        spec, is_frozen = self._config.spec, self._config.job.lora is not None
        return sum(
            training_flops(spec, tokens.lengths, tokens.predicted, is_frozen, tokens.before, self._forward_only)
            for tokens in as_computed(self._config, batch)
        )

    def _joined(self, each: torch.Tensor) -> Iterator[MetricSum]:
        """Every metric over all ranks, from their numbers."""
        for place, name in enumerate(self._metric_names):
            at = FIRST_METRIC + 2 * place
            yield joined(name, [MetricSum(*pair) for pair in each[:, at : at + 2].tolist()])

    def _metric(self, name: str, result: StepResult) -> tuple[float, float]:
        """What this rank adds to a metric: nothing where it is not of the last stage, or another rank adds the same."""
        found = result.metrics.get(name) if self._counts else None
        return (0.0, 0.0) if found is None else (found.total, found.count)


def seconds_since(start: float) -> float:
    """Since `start`; never 0, as it is divided by."""
    return max(time.monotonic() - start, 1e-9)


def _gathered(world: Group, numbers: list[float]) -> torch.Tensor:
    """Every rank's numbers, a row each, in float64."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    return torch.stack(world.all_gather(mine, [tuple(mine.shape)] * world.size))
