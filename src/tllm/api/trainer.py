"""`Trainer`: a training run for Python programs and for `tllm train`, over processes of this machine or nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tllm.api.interruptible import result_of
from tllm.cluster.settings import OUR_LINKS, Wiring
from tllm.core.errors import ConfigError, PlanError, counted
from tllm.hub.locate import locate
from tllm.node.coordinator.cluster_options import DEFAULTS, ClusterOptions
from tllm.spec.plan import Plan
from tllm.spec.process_groups import RoleName
from tllm.text.same_vocabulary import check_same_vocabulary
from tllm.training.job.initial_model import InitialModel, judge_specs, open_initial_model, spec_of
from tllm.training.job.job import Job
from tllm.training.job.job_file import DEFAULT, ResolvedJob, read_job
from tllm.training.job.job_parts import role_key, role_nodes, with_role_nodes
from tllm.training.job.key_limits import WantedNodes
from tllm.training.job.run_folder import check_goes_on, start_now, write_start
from tllm.training.report.events import RunBegan, RunEnded, RunEvent, RunStepped
from tllm.training.report.metrics import StepRecord, check_sinks
from tllm.training.tools.row_functions import keep_rows
from tllm.training.tools.user_functions import check_files

if TYPE_CHECKING:
    from tllm.node.coordinator.plan_selection import PlanChoice
    from tllm.node.machine.launcher_env import Launched
    from tllm.node.train.open_training import OnLoss, TrainingRun

OnEvent = Callable[[RunEvent], object]
"""on_event(event): a run's beginning, steps, saves, losses of ranks, resumptions and end, as they happen"""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended: after which step, the trained model's folder (None if it was stopped before its last step), and
    the record of each step that was taken, with loss, gradient norm, learning rate and tokens per second."""

    step: int
    model: Path | None
    records: tuple[StepRecord, ...]


class Trainer:
    """One run of a job. What the folder `output_dir` has of an earlier run of the same job is gone on with.

        keys = {"config_name": "config.json", "train_files": ["rows.jsonl"], "output_dir": "run", "max_steps": 100}
        result = Trainer(keys, plan="dp=2").train(print)

    `job` is a TOML file or a mapping of the same keys; `overrides` are "key=value" texts that come after it.
    `plan` is the job's own unless it is given here; without either, `ranks` of them are replicas (dp), one by default.
    Nodes that have a role beside the plan (`rollout_nodes`, `teacher_nodes`) are among the `ranks`.
    """

    def __init__(
        self,
        job: Path | str | Mapping[str, Any] | None,
        *,
        plan: str | None = None,
        overrides: Sequence[str] = (),
        ranks: int | None = None,
    ) -> None:
        """Raises ConfigError or PlanError where job, model and plan do not fit each other; writes nothing."""
        from tllm.training.job.combinations import (
            check_combination,
            warn_of_context,
            warn_of_idle,  # all with torch, which `tllm train --help` does without
        )

        self.resolved = read_job(Path(job) if isinstance(job, str) else job, overrides, plan)
        check_sinks(self.resolved.job.report_to)
        self.spec = spec_of(self.resolved.job)
        self.resolved, self.plan = self._shared_out(ranks)
        check_combination(self.resolved.job, self.plan, self.spec)
        warn_of_context(self.resolved.job, self.spec)
        if self.resolved.origins["plan"] != DEFAULT:  # one that is chosen leaves nobody idle
            warn_of_idle(self.resolved.job, self.plan)

    @cached_property
    def beginning(self) -> InitialModel:
        """What the run begins from. Asking for it makes the run's folder, where there is none, and calls functions of
        the job that give rows. AuthError where programs at addresses that the job names do not trust the run,
        ConfigError where the first row of a file is none, or what else the job names is not there or of no use: before
        machines are waited for."""
        from tllm.training.answerer_trust import check_trust
        from tllm.training.evaluation.forward_work import check_best_metric
        from tllm.training.harness.harness_evaluation import check_installed

        check_best_metric(self.resolved.job, self.spec)
        check_installed(self.resolved.job)
        check_goes_on(self.resolved.job)
        check_trust(self.resolved.job)
        _check_rewards(self.resolved.job)
        keep_rows(self.resolved.job)
        initial = open_initial_model(self.resolved.job)
        initial.check_rows(self.resolved.job)
        _check_teacher(self.resolved.job, initial)
        return initial

    @property
    def config(self) -> str:
        """The text of the model's `config.json`, as every rank is told it."""
        return json.dumps(self.beginning.config)

    def open(
        self,
        options: ClusterOptions = DEFAULTS,
        *,
        choice: PlanChoice | None = None,
        on_loss: OnLoss = "replan",
        wiring: Wiring = OUR_LINKS,
        launched: Launched | None = None,
    ) -> AbstractAsyncContextManager[TrainingRun]:
        """The run's ranks, ready for their first step; `follow` is then to be read.

        With a `choice` the plan only says for how many nodes to wait. `launched`: a launcher such as torchrun has
        started the processes; this one is rank 0 of them, and a lost rank ends them all.
        """
        from tllm.node.train.open_training import TrainingWork, open_launched, open_training

        work = TrainingWork(self.resolved, self.plan, self.config, wiring)
        if launched is not None:
            return open_launched(launched, work, options)
        return open_training(work, options, choice=choice, on_loss=on_loss)

    async def follow(self, run: TrainingRun, resolved: ResolvedJob | None = None) -> AsyncGenerator[RunEvent, None]:
        """The run's events up to its end, each beginning written down in the run's folder.

        `resolved` is the job as a plan that was chosen changed it. Raises what a rank failed with, by its node's name.
        """
        resolved = resolved or self.resolved
        async for event in run.events():
            if isinstance(event, RunBegan):
                write_start(Path(resolved.job.output_dir), resolved, start_now(event.step, run.plan))
            yield event

    def train(
        self, on_event: OnEvent | None = None, options: ClusterOptions = DEFAULTS, *, on_loss: OnLoss = "replan"
    ) -> TrainResult:
        """Train to the end. An interrupt (Ctrl-C) saves, leaves and is raised again; the same call then goes on."""
        return _InThread(self, on_event or (lambda event: None)).run(options, on_loss)

    def _shared_out(self, ranks: int | None) -> tuple[ResolvedJob, Plan]:
        """The plan for the machines or processes that have no role beside it; and the job, in which a role that is left
        to the planner has the nodes that a given plan leaves, or none where there is one machine."""
        job, is_default = self.resolved.job, self.resolved.origins["plan"] == DEFAULT
        roles = role_nodes(job)
        autos, beside = [role for role, wanted in roles.items() if wanted.is_auto], _count(roles)
        if ranks and beside >= ranks:
            raise ConfigError(
                f"{' and '.join(role_key(job, role) for role in roles)} take {beside} of {ranks} machines or processes",
                "one at least must train: let more join, or give fewer roles",
            )
        plan = Plan.parse(f"dp={ranks - beside}" if is_default and ranks else job.plan, self.spec.num_layers)
        if autos and not (ranks and ranks > 1):
            for role in autos:
                job = with_role_nodes(job, role, ())
        elif len(autos) == 1 and ranks and not is_default:
            left = ranks - beside - plan.world_size
            job = with_role_nodes(job, autos[0], (left,) if left > 0 else ())
        having_roles = _count(role_nodes(job))
        if ranks and plan.world_size != ranks - having_roles:
            of_which = f", of which {having_roles} have a role beside it" if having_roles else ""
            raise PlanError(
                f"the plan {plan} has {counted(plan.world_size, 'rank')} for {ranks} machines or processes{of_which}",
                "give a plan with a rank for each, or leave it out for a replica on each",
            )
        return replace(self.resolved, job=job), plan


def train(
    job: Path | str | Mapping[str, Any],
    *,
    plan: str | None = None,
    overrides: Sequence[str] = (),
    on_event: OnEvent | None = None,
) -> TrainResult:
    """Train a job to its end on this machine, with a process for each rank of the plan: `Trainer(...).train()`."""
    return Trainer(job, plan=plan, overrides=overrides).train(on_event)


def _count(roles: Mapping[RoleName, WantedNodes]) -> int:
    return sum(wanted.count for wanted in roles.values())


class _InThread:
    """A run on an event loop of its own thread, so that a caller with a loop (a notebook) can wait for it too."""

    def __init__(self, trainer: Trainer, on_event: OnEvent) -> None:
        self._trainer, self._on_event = trainer, on_event
        self._records: list[StepRecord] = []
        self._stop: Callable[[], object] = lambda: None

    def run(self, options: ClusterOptions, on_loss: OnLoss) -> TrainResult:
        with ThreadPoolExecutor(1, "tllm-train") as thread:
            result = thread.submit(lambda: asyncio.run(self._train(options, on_loss)))
            try:
                return result_of(result)
            except KeyboardInterrupt:
                self._stop()
                raise  # when the thread has ended, as leaving the block waits for it

    async def _train(self, options: ClusterOptions, on_loss: OnLoss) -> TrainResult:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "a task trains"
        self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
        async with self._trainer.open(options, on_loss=on_loss) as run:
            self._stop = lambda: loop.call_soon_threadsafe(run.stop)
            async for event in self._trainer.follow(run):
                if isinstance(event, RunStepped):
                    self._records.append(event.record)
                self._on_event(event)
                if isinstance(event, RunEnded):
                    return TrainResult(event.step, Path(event.final) if event.final else None, tuple(self._records))
        raise AssertionError("a run ends with an event, or with an error")


def _check_teacher(job: Job, initial: InitialModel) -> None:
    """ConfigError for a teacher that a job names and whose tokens are others than its student's."""
    name = None if job.distill is None else job.distill.teacher_model_name_or_path
    if name and (found := judge_specs(job).teacher) is not None:
        sizes = initial.spec.vocab_size, found.vocab_size
        check_same_vocabulary(initial.folder, locate(name, "config").path, *sizes, "teacher")


def _check_rewards(job: Job) -> None:
    """ConfigError for a function whose file is not there, and for a reward model that gives no score."""
    from tllm.training.questions.answering_model import check_scores

    if (config := job.rollouts) is None:
        return
    check_files(config)
    if config.reward_model_name_or_path and (found := judge_specs(job).reward) is not None:
        check_scores(config.reward_model_name_or_path, found)
