"""`RankTrainer`: one rank of a training run, from an empty model to the last save. Every rank makes the same calls."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from tllm.core.errors import ConfigError
from tllm.training.checkpoint.commit import SaveResult
from tllm.training.data.batches import Batches
from tllm.training.evaluation.forward_work import ForwardWork
from tllm.training.feeds import completion_source, other_evaluations, policy_feed, rows_feed
from tllm.training.job.initial_model import InitialModel
from tllm.training.job.job_parts import (
    is_evaluated_by_completions,
    is_sampled,
    is_sampled_apart,
    learning_rate_schedule,
)
from tllm.training.job.target_modules import adapter_parameter_count
from tllm.training.measure.peak_flops import known_peak
from tllm.training.parameter_server.learner import ParameterServerLearner
from tllm.training.policy.rollouts import MakeRollouts, Rollouts
from tllm.training.questions.stop_signal import STOPPED
from tllm.training.report.events import (
    TOLD_COMPLETIONS,
    IsStopped,
    OnEvent,
    RunBegan,
    RunEnded,
    RunSaved,
    RunStepped,
    RunWaits,
    TrainerReady,
)
from tllm.training.report.metrics import Sink, StepRecord, sinks
from tllm.training.report.step_report import RankCounters, StepReport
from tllm.training.rollout_servers.remote_rollouts import RemoteRollouts
from tllm.training.run_state import NO_MODEL, RunState
from tllm.training.snapshot.replication import SnapshotReplicator
from tllm.training.state.initial_weights import InitialWeights, parameter_count
from tllm.training.state.train_state import FlatMemory
from tllm.training.step.device_limits import check_device
from tllm.training.step.rank_groups import RankConfig
from tllm.training.step.rank_model import RankModel
from tllm.training.step.shared_prompts import with_shared_prompts
from tllm.training.sync.diloco import DiLoCoLearner
from tllm.training.sync.learner import Learner, SynchronousLearner
from tllm.weights.dtypes import torch_dtype
from tllm.weights.load import Progress

PEAK_SECONDS = 0.3
"""Time to measure the matrix peak in, which a step's flop/s are held against."""

MEET_STEPS = 16
"""Steps between meetings of replicas that otherwise do not wait for each other (asynchronous parameter servers): a stop
may be heard so late, and one replica may be so far ahead. More would hear a stop later; fewer would have the fast
replicas wait for every delay of a slow one."""


class RankTrainer:
    """Builds this rank's part of the model; then call `prepare`, then `run`.

    `initial_model` is given on rank 0, who alone reads the data and writes metrics and the finished model. `replicator`
    keeps snapshots of steps in other ranks' memory. `make_rollouts` makes what samples completions, for the tasks that
    learn from some. `prepare` sets what is annotated here.
    """

    _learner: Learner
    _report: StepReport
    _fault: tuple[str, str] | None = None

    def __init__(
        self,
        config: RankConfig,
        initial_weights: InitialWeights,
        initial_model: InitialModel | None = None,
        replicator: SnapshotReplicator | None = None,
        make_rollouts: MakeRollouts | None = None,
    ) -> None:
        check_device(config)
        self.config = config = with_shared_prompts(config)
        self._model = RankModel(config)
        self._meet_steps = MEET_STEPS if config.plan.servers and config.job.max_staleness else 1
        model, beginning, with_positions = self._model, initial_model, replicator is not None
        rollouts: Rollouts | None = None
        if is_sampled_apart(config.job):
            rollouts = RemoteRollouts(config, model, beginning)
        elif make_rollouts is not None and is_sampled(config.job):
            rollouts = make_rollouts(config, model)
        source = None if rollouts is None else completion_source(config, beginning, rollouts)
        self._feed, position = (
            rows_feed(config, beginning, self._meet_steps, with_positions)
            if source is None or config.job.rollouts is None
            else policy_feed(config, beginning, source, initial_weights, model, with_positions)
        )
        self._state = RunState(config, self._learning_rate, initial_weights, initial_model, position, replicator)
        batches = position if isinstance(position, Batches) else None
        others = other_evaluations(config, model, beginning, source)
        self._forward = ForwardWork(config, model, beginning, batches, others)
        self._sinks: list[Sink] = []
        self._step, self._closing = 0, ExitStack()
        parts = [config.groups.close_devices, self._feed.close, model.close, self._state.close, self._forward.close]
        for part in parts if source is None else [*parts, source.close]:
            self._closing.callback(part)

    @property
    def compute_seconds(self) -> float:
        """Of the last step's passes, without the time in which this stage waited for another."""
        return self._model.compute_seconds

    def prepare(self, progress: Progress | None = None) -> TrainerReady:
        """Fill the model from the last step that memory or a save of the run holds, else with the initial weights."""
        config, adapters = self.config, self._model.adapters
        self._state.fill_frozen(self._model.chunks, progress)
        self._learner = make_learner(config, self._model, self._state.kept_memory)
        self._closing.callback(self._learner.close)
        self._forward.prepare(lambda: self._state.initialize(self._learner, adapters, progress))
        self._step = self._state.restore(self._learner, adapters, self._forward.best, progress)
        peak = known_peak(torch_dtype(config.job.dtype), PEAK_SECONDS, config.device)
        names = self._model.objective.metric_names
        self._report = StepReport(config, peak, names)
        return TrainerReady(self._step, self._learner.weight_bytes, self._learner.state_bytes)

    def run(self, on_event: OnEvent, is_stopped: IsStopped = lambda: False) -> None:
        """Take the steps that are left, or end after the one in which any rank is stopped or evaluations end it; saved.

        Where rank 0 cannot make a step's batch, the steps before are saved, and every rank raises why: ConfigError. One
        that it was waiting for when it was stopped is not taken, where nobody could be reached who makes it.
        """
        job, spec = self.config.job, self.config.spec
        self.config.stop.follow(is_stopped)
        if self.config.rank == 0:
            self._sinks = sinks(Path(job.output_dir), job.report_to, self._step, is_evaluated_by_completions(job))
            for sink in self._sinks:
                self._closing.callback(sink.close)
        facts = self._report.peak, self.config.groups.network, self._state.origin, self._model.products
        adapted, disk = adapter_parameter_count(job.lora, spec), self._state.missing_room(self._step)
        on_event(RunBegan(self._step, parameter_count(spec), *facts, adapted, disk))
        self._state.complete_restored_step(self._step, self._forward.best.standing)
        stop = bool(self._forward.best.reason)
        if self._step < job.max_steps and not stop:
            self._feed.begin(self._step, job.max_steps)
        while self._step < job.max_steps and not (stop and self._feed.is_between):
            stop = self.train_step(on_event, is_stopped())
        if self._step:
            self._state.save(self._step, self._forward.best.standing)
        self._learner.finish()
        self._state.flush_snapshot()
        self._report_saves(self._state.wait_for_saves(), on_event)
        if self._fault is not None and self._fault != STOPPED:
            raise ConfigError(*self._fault)
        reason = self._forward.best.reason if self._step < job.max_steps else ""
        is_done = self._fault is None and (bool(reason) or self._step == job.max_steps)
        final = self._state.write_final_model(self._step, self._forward.best) if is_done else NO_MODEL
        on_event(RunEnded(self._step, final.folder, reason, final.step, final.choice))

    def train_step(self, on_event: OnEvent, stopped: bool = False) -> bool:
        """One step: gradients of this rank's microbatches, summed over ranks, move the weights. Whether to stop.

        The rows come from `BatchFeed`, which reads the next ones meanwhile. Gradients are summed by `GradientBuckets`
        while backward passes run; the `Learner` clips them and updates the weights.
        """
        start = time.monotonic()
        batch = self._feed.next(lambda reason: on_event(RunWaits(self._step, reason)))
        if batch.fault is not None:
            self._fault = batch.fault
            return True
        microbatches = self._forward.before_passes(self._feed.microbatches(batch))
        loss_scale = self._learner.begin_step(batch, microbatches)
        result = self._model.forward_backward(microbatches, batch.global_microbatches, loss_scale)
        learning_rate = self._learning_rate(self._step)
        self._step += 1
        snapshot_is_due = self._state.is_snapshot_due(self._step)
        if snapshot_is_due:  # all ranks know by the norm that the snapshot before is complete, and write over its elder
            self._state.flush_snapshot()
        grad_norm = self._learner.apply_gradients(self._step, learning_rate, result.loss_sum)
        trained = time.monotonic()
        evaluated = self._forward.evaluate(self._step)
        start += time.monotonic() - trained  # an evaluation is not of the step's time
        ended, balance = self._forward.best.reason if evaluated else "", self._model.load_balance_loss
        work = batch, microbatches, result, grad_norm, learning_rate, start
        counters = RankCounters(*work, balance, evaluated, ended, self._feed.role_seconds, self.config.predicted)
        record, stop = self._record(counters, stopped)
        completions = evaluated.completions if evaluated is not None else ()
        for sink in self._sinks:  # before a save or snapshot of this step can be whole: none is ahead of its lines
            sink.write(record, completions)
        if snapshot_is_due:
            self._state.take_snapshot(self._step, self._feed.position(batch), self._forward.best.standing)
        on_event(RunStepped(record, completions[:TOLD_COMPLETIONS]))
        if self._state.is_save_due(self._step):
            self._state.save(self._step, self._forward.best.standing)
        self._report_saves(self._state.finished_saves(), on_event)
        if evaluated is not None:
            self._fault = self._fault or evaluated.fault
        return stop or self._fault is not None or bool(self._forward.best.reason)

    def close(self) -> None:
        """End the threads of this rank, once its links are closed or the run has ended."""
        self._closing.close()

    def _record(self, counters: RankCounters, stopped: bool) -> tuple[StepRecord, bool]:
        """The step's record and whether any rank is stopped, where ranks meet in this step; else this rank's own."""
        if self._step % self._meet_steps == 0 or self._state.is_save_due(self._step):
            return self._report.record(self._step, counters, stopped)
        return self._report.record_alone(self._step, counters), False

    def _learning_rate(self, step: int) -> float:
        """Of a step, the first being 0."""
        return self.config.job.learning_rate * learning_rate_schedule(self.config.job).factor(step)

    def _report_saves(self, results: list[SaveResult], on_event: OnEvent) -> None:
        for result in results:
            on_event(RunSaved(result.step, result.seconds, result.nbytes, result.error))


def make_learner(config: RankConfig, model: RankModel, kept: FlatMemory | None) -> Learner:
    """How the replicas learn together: on servers, in local steps (DiLoCo), or by summing every step's gradients."""
    if config.plan.servers:
        return ParameterServerLearner(config, model.learned)
    if config.job.local_steps > 1:
        return DiLoCoLearner(config, model.learned)
    return SynchronousLearner(config, model.learned, kept)
