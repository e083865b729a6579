"""`ElasticRun`: a training run that outlives its nodes. What a lost node held is restored from other nodes' memory, or
from a save."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from tllm.cluster.certificates import Authority
from tllm.cluster.connection import Address
from tllm.cluster.consensus.replicated_state import TrainedSteps
from tllm.cluster.settings import PredictedSeconds, TrainSettings
from tllm.core.errors import CapacityError, ClusterError, PlanError, TllmError, counted
from tllm.core.tasks import end_tasks
from tllm.node.coordinator.cluster_options import OnProgress
from tllm.node.coordinator.losses import Loss
from tllm.node.coordinator.workload import Workload
from tllm.node.recovery.recovery import WAIT_SECONDS, Patience, Policy, Recovery
from tllm.node.train.run_progress import RunProgress
from tllm.node.train.training_run import TrainingRun, is_mirrored, job_of
from tllm.planner.search.replan import training_plans_on
from tllm.spec.plan import Plan
from tllm.training.job.combinations import check_combination
from tllm.training.job.job_parts import can_mirror
from tllm.training.report.events import RunBegan, RunEvent, RunLostRank, RunResumed, RunSaved, RunStepped
from tllm.training.report.metrics import last_step

log = logging.getLogger("tllm.node")

LOCAL_SECONDS = 20.0
"""A worker of this machine that is started again is waited for so long, before the others go on without it."""

BACK_SECONDS = 10.0
"""Where a node has come back from a coordinator that has ended, the others of that one are waited for so long."""


class ElasticRun(TrainingRun):
    """The run pauses with a loss and goes on in the next epoch, under the same plan if there are nodes for it.

    Nodes that join are taken in with the next loss, or when a step has ended once they are worth the pause. A run that
    fails by itself, on bad data say, ends as any other. Nodes that wait for another coordinator, or for one of the same
    authority, have their part of the run in memory.

    `recovery` begins the epochs; `progress` counts steps and interruptions. `must_mirror`: the run may not go without
    in-memory snapshots of its steps, where there is no room for them.
    """

    def __init__(
        self,
        work: Workload,
        authority: Authority,
        address: Address,
        first: Sequence[str] = (),
        policy: Policy = "replan",
    ) -> None:
        super().__init__(elastic(work), authority, address, first)
        wait = math.inf if policy == "wait" else WAIT_SECONDS
        # A step may take longer than anything that could be waited for: pauses are only between two steps.
        patience = Patience(wait=wait, restore=math.inf, local=LOCAL_SECONDS)
        self.recovery = Recovery(self, self.coordinator, policy, patience)
        self.progress = RunProgress(done=last_step(Path(self._job.output_dir)))
        self.must_mirror = False
        self._is_between = False  # steps, with nodes here that are worth a pause

    @property
    def is_open(self) -> bool:
        """Whether the ranks compute now."""
        return self.recovery.is_open

    @property
    def is_idle(self) -> bool:
        return self._is_between

    async def form(self, seconds: float | None = None, on_progress: OnProgress | None = None) -> None:
        """Wait for enough nodes, `seconds` at most, and begin the first epoch on them."""
        nodes = await self.choose(await self.nodes_to_begin(seconds), on_progress)
        async with self.roles.beginning():
            await self.recovery.begin(nodes, on_progress)
        if self._is_stopped:  # meanwhile, by a node's operator
            self.stop()

    async def wait_for_nodes(self, seconds: float | None) -> tuple[str, ...]:
        """As many as are wanted; those that came back from a coordinator that has ended may go on alone."""
        every = asyncio.create_task(self.coordinator.wait_for_nodes(seconds))
        fewer = asyncio.create_task(self._wait_for_returned())
        try:
            await asyncio.wait((every, fewer), return_when=asyncio.FIRST_COMPLETED)
            return await (fewer if fewer.done() and not every.done() else every)
        finally:
            await end_tasks(every, fewer)

    async def choose(self, nodes: tuple[str, ...], on_progress: OnProgress | None = None) -> tuple[str, ...]:
        selection = self.coordinator.selection
        is_kept = selection.choice is None or selection.choice.is_given
        if len(nodes) < self.coordinator.work.plan.world_size and is_kept:
            selection.choice = None  # the plan is cut down for fewer nodes, and its speed is not predicted
            return nodes
        return await super().choose(nodes, on_progress)

    def move(self, plan: Plan, nodes: Sequence[str], predicted: PredictedSeconds | None = None) -> None:
        """Go on under another plan, whose ranks these nodes take in order: from the last step that is whole in memory.

        The step that is under way is taken again. PlanError where the job and the plan do not go together.
        """
        check_combination(self._job, plan, self._spec)
        self.recovery.move.begin(plan, nodes)  # which keeps what was predicted before, should it be taken back
        work = self.coordinator.work
        self.coordinator.work = replace(work, settings=msgspec.structs.replace(work.settings, predicted=predicted))
        self.progress.pause()

    def take_up(self, trained: TrainedSteps | None, is_mirrored: bool) -> None:
        """Go on with a run that another coordinator has begun. `is_mirrored`: whether it kept snapshots of steps."""
        if trained is not None:
            self.progress.take_up(trained.step, trained.saved)
        work = self.coordinator.work
        settings = msgspec.structs.replace(work.settings, mirrored=is_mirrored)
        self.coordinator.work = replace(work, settings=settings)

    def adopt(self, work: Workload) -> Workload:
        return super().adopt(elastic(work))

    def publish(self, event: RunEvent) -> None:
        super().publish(event)
        if isinstance(event, RunStepped):
            self._stepped(event.record.step)
        elif isinstance(event, RunSaved):
            self.progress.saved = self.progress.saved if event.error else event.step
        elif isinstance(event, RunBegan):
            self._check_beginning(event)
            if self.progress.is_resumed(event):
                self._resumed(event)
            self.progress.began(event)

    def plan_on(self, taken: Mapping[int, str]) -> tuple[Plan, tuple[str, ...]]:
        """Also nodes beyond the plan's ranks, which have something of the run in memory."""
        wanted = self.coordinator.work.plan
        why: PlanError = PlanError(f"no rank is left of plan {wanted}", "let a node join")
        for plan, ranks in training_plans_on(wanted, taken):
            nodes = tuple(taken[rank] for rank in ranks)
            try:
                check_combination(self._job, plan, self._spec)
                if plan != wanted:  # for the plan itself room was looked for when the run began
                    self.check_room(plan, nodes, self._is_mirrored and self.progress.has_begun)
            except PlanError as error:
                why = error
                continue
            return plan, (*nodes, *self._memory_holders(nodes))
        raise why

    def before_epoch(self, plan: Plan, nodes: Sequence[str]) -> None:
        """Before the first step: keep no snapshots where they find no room. CapacityError if they must be kept."""
        if not self._is_mirrored or self.progress.has_begun:
            return
        try:
            self.check_room(plan, nodes[: plan.world_size], mirrored=True)
        except CapacityError as error:
            why = f"with copies of steps in memory {error.message}"
            if self.must_mirror:
                hint = "let more machines join, or leave mirror_steps out: the run then goes without copies"
                raise CapacityError(why, hint) from error
            log.warning("keeps no copies of steps, and a lost node costs those since the last save: %s", why)
            work = self.coordinator.work
            settings = msgspec.structs.replace(work.settings, mirrored=False)
            self.coordinator.work = replace(work, settings=settings)

    def resume(self) -> None:
        self.fault = None
        self._ended, self._is_between = None, False
        if self._is_stopped:
            self.stop()

    def give_up(self, error: TllmError) -> None:
        self.fail(error)

    def survives(self, error: TllmError) -> bool:
        """If the run has just moved to another plan, it returns to the one before, which may be what was at fault.

        Else what a rank fails of by itself, and no network or machine, every other node would fail of too.
        """
        if self.recovery.move.take_back(error.message) or isinstance(error, ClusterError):
            return True
        self.fail(error)
        return False

    def interrupted(self, loss: Loss | None) -> None:
        self.progress.interrupt()
        if self.progress.is_in_vain:
            cause = self.recovery.losses.cause()
            why = cause.error.message if cause is not None else self.recovery.trouble()[1]
            count = self.progress.interruptions
            self.fail(ClusterError(f"{count} losses in a row, and no step between them; the last: {why}"))
        if loss is not None:
            self.publish(RunLostRank(self.progress.step, loss.node, loss.error.message))

    @property
    def _is_mirrored(self) -> bool:
        return is_mirrored(self.coordinator.work)

    def _memory_holders(self, nodes: Sequence[str]) -> list[str]:
        """Those without a rank now who may have something in memory that nobody else has, and whom all others reach."""
        had = [member.node for member in self.state.living if member.rank is not None or member.before is not None]
        without = {*nodes, *self.recovery.left_out.apart()}
        return [node for node in had if node not in without] if self._is_mirrored else []

    async def _wait_for_returned(self) -> tuple[str, ...]:
        """Those who are here once the first has waited long enough for the others, if they will do."""
        coordinator, recovery = self.coordinator, self.recovery
        await recovery.until(lambda: self.state.returned_count > 0)
        await asyncio.sleep(BACK_SECONDS)
        await recovery.until(lambda: set(coordinator.first) <= set(recovery.living()) and recovery.lack() is None)
        nodes = coordinator.nodes
        log.warning("goes on with the %d of %d nodes that are here", len(nodes), coordinator.work.plan.world_size)
        return nodes

    def _check_beginning(self, began: RunBegan) -> None:
        """A run that has saved something does not begin anew because the saves are elsewhere."""
        if began.origin == "save":
            self.progress.saved = began.step
        elif began.origin == "start" and self.progress.saved:
            self.fail(
                ClusterError(
                    f"no step is whole in memory, and no file of the save of step {self.progress.saved} is on the "
                    "machines that are left",
                    f"bring back the machine that wrote it, or its {self._job.output_dir}, and start the run there",
                )
            )

    def _stepped(self, step: int) -> None:
        self.progress.stepped(step)
        if not self.recovery.move.is_pending:  # else it is a step under the plan before
            self.recovery.move.confirm()
        self._is_between = self.recovery.is_growth_due()

    def _resumed(self, began: RunBegan) -> None:
        again = max(0, self.progress.step - began.step)
        if began.origin != "memory":
            lost = counted(again, "step is", "steps are")
            log.warning("no step is whole in memory: goes on after step %d, %s lost", began.step, lost)
        seconds = self.progress.resume()
        nodes = tuple(member.node for member in self.state.seated)
        self.publish(RunResumed(began.step, again, seconds, str(self.state.plan), nodes, began.origin))


def elastic(work: Workload) -> Workload:
    """The same work by ranks that outlive each other, and mirror what they hold where that is all that there is."""
    assert isinstance(work.settings, TrainSettings), "serving outlives losses by its own rules"
    mirrored = work.plan.world_size > 1 and can_mirror(job_of(work), work.plan.servers)
    return replace(work, settings=msgspec.structs.replace(work.settings, outlives=True, mirrored=mirrored))
