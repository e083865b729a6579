"""`ElasticRun`: a training run that outlives its nodes: what a lost one held others have in memory, or a save."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from tllm.cluster.certificates import Authority
from tllm.cluster.connection import Address
from tllm.cluster.settings import SurveySettings, TrainSettings
from tllm.core.errors import CapacityError, ClusterError, PlanError, TllmError
from tllm.node.coordinator.cluster_options import OnProgress
from tllm.node.coordinator.coordinator import Workload
from tllm.node.coordinator.recovery import Policy, RecoveringCoordinator
from tllm.node.train.training_run import TrainingRun, is_mirrored, job_of
from tllm.planner.search.replan import training_plans_on
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan
from tllm.train.job.combinations import check_combination
from tllm.train.job.job_parts import can_mirror
from tllm.train.report.events import RunBegan, RunEvent, RunLostRank, RunResumed, RunStepped
from tllm.train.report.metrics import last_step

log = logging.getLogger("tllm.node")

LOCAL_SECONDS = 20.0
"""A worker of this machine that is started again is waited for so long, before the others go on without it."""

BACK_SECONDS = 10.0
"""Where a node has come back from a coordinator that has ended, the others of that one are waited for so long."""

IN_VAIN = 4
"""Epochs in a row in which no new step was done, after which what ends them is taken for the run's own fault."""


class ElasticRun(TrainingRun, RecoveringCoordinator):
    """The run pauses with a loss and goes on in the next epoch, under the same plan if there are nodes for it.

    A node that joins is taken in when a step has ended. A run that fails by itself, on bad data say, ends as any other.
    So it does with its coordinator: nodes that wait for one of the same authority have their part of the run in memory.
    """

    def __init__(
        self,
        work: Workload,
        authority: Authority,
        address: Address,
        first: Sequence[str] = (),
        policy: Policy = "replan",
    ) -> None:
        self._job = job_of(work)
        self._spec = spec_from_config(json.loads(work.config))
        self._step, self._reached = last_step(Path(self._job.output_dir)), 0
        self._in_vain = 0
        self._has_begun = False
        self._is_between = False  # steps, with a node here that could be put to use
        self._since, self._hurry = math.nan, 0.0
        self.must_mirror = False  # else copies of steps are only kept where there is room
        super().__init__(lasting(work), authority, address, first)
        self.policy = policy
        if policy == "wait":
            self.wait_seconds = math.inf

    def move(self, plan: Plan, nodes: Sequence[str]) -> None:
        """Go on under another plan, whose ranks these nodes take in order: from the last step that is whole in memory.

        The step that is under way is taken again. PlanError where the job and the plan do not go together.
        """
        check_combination(self._job, plan, self._spec)
        super().move(plan, nodes)
        self._since = time.monotonic()

    @property
    def is_idle(self) -> bool:
        return self._is_between

    def may_pause(self) -> bool:
        return self._is_between  # a step may take longer than anything that could be waited for

    async def wait_for_nodes(self, seconds: float | None) -> tuple[str, ...]:
        """As many as the plan has ranks; those that came back from a coordinator that has ended may go on alone."""
        every, fewer = asyncio.create_task(super().wait_for_nodes(seconds)), asyncio.create_task(self._come_back())
        try:
            await asyncio.wait((every, fewer), return_when=asyncio.FIRST_COMPLETED)
            return await (fewer if fewer.done() and not every.done() else every)
        finally:
            every.cancel()
            fewer.cancel()
            await asyncio.gather(every, fewer, return_exceptions=True)

    async def chosen(self, nodes: tuple[str, ...], on_progress: OnProgress | None = None) -> tuple[str, ...]:
        if len(nodes) < self.work.plan.world_size and (self.choice is None or self.choice.is_given):
            self.choice = None  # the plan is cut down for fewer nodes, and nothing foretold
            return nodes
        return await super().chosen(nodes, on_progress)

    async def bring_up(
        self, plan: Plan, nodes: Sequence[str], on_progress: OnProgress | None, survey: SurveySettings | None = None
    ) -> None:
        if survey is None and is_mirrored(self.work) and not self._has_begun:
            self._check_mirror(plan, nodes[: plan.world_size])
        await super().bring_up(plan, nodes, on_progress, survey)

    def on_loss(self, node: str, error: TllmError) -> None:
        member = self.state.member(node)
        has_part = member is not None and self.has_seat(member)
        went_back = has_part and self.go_back(error.message)  # the plan may be what it failed of
        if has_part and not went_back and not isinstance(error, ClusterError):
            self.fail(error)  # every other node would fail so too
            return
        super().on_loss(node, error)
        if has_part:
            self._broke_off()
            self._hurry = time.monotonic() + LOCAL_SECONDS
            self.pass_on(RunLostRank(self._step, node, error.message))

    def on_break(self) -> None:
        super().on_break()
        self._broke_off()

    def go_on(self) -> None:
        self._ended, self._is_between = None, False
        if self._is_stopped:
            self.stop()

    def give_up(self, error: TllmError) -> None:
        self.fail(error)

    def take(self, work: Workload) -> None:
        super().take(lasting(work))
        self._job = job_of(work)

    def pass_on(self, news: RunEvent) -> None:
        super().pass_on(news)
        if isinstance(news, RunStepped):
            self._stepped(news.record.step)
        elif isinstance(news, RunBegan):
            if self._has_begun or news.step < self._step or news.origin == "memory":
                self._resumed(news)
            self._step, self._has_begun = news.step, True

    def plan_on(self, taken: Mapping[int, str]) -> tuple[Plan, tuple[str, ...]]:
        why: PlanError = PlanError(f"no rank is left of plan {self.work.plan}", "let a node join")
        for plan, ranks in training_plans_on(self.work.plan, taken):
            nodes = tuple(taken[rank] for rank in ranks)
            try:
                check_combination(self._job, plan, self._spec)
                self._check_room(plan, nodes)
            except PlanError as error:
                why = error
                continue
            return plan, (*nodes, *self._lenders(nodes))
        raise why

    def _lenders(self, nodes: Sequence[str]) -> list[str]:
        """Those without a rank now who may have something in memory that nobody else has."""
        had = [member.node for member in self.state.living if member.rank is not None or member.before is not None]
        return [node for node in had if node not in nodes] if is_mirrored(self.work) else []

    def _check_room(self, plan: Plan, nodes: Sequence[str]) -> None:
        """CapacityError where a machine has less memory than its ranks of a plan take."""
        if plan == self.work.plan:
            return  # as was asked when it began
        self.check_room(plan, nodes, is_mirrored(self.work) and self._has_begun)

    def _check_mirror(self, plan: Plan, nodes: Sequence[str]) -> None:
        """Before the first step: keep no copies where they find no room. CapacityError if they must be kept."""
        try:
            self.check_room(plan, nodes, mirrored=True)
        except CapacityError as error:
            why = f"with copies of steps in memory {error.message}"
            if self.must_mirror:
                hint = "let more machines join, or leave mirror_steps out: the run then goes without copies"
                raise CapacityError(why, hint) from error
            log.warning("keeps no copies of steps, and a lost node costs those since the last save: %s", why)
            settings = msgspec.structs.replace(self.work.settings, mirrored=False)
            self.work = replace(self.work, settings=settings)

    def _lack(self) -> TllmError | None:
        """Also that a worker of this machine is on its way, where there are too few for the plan without it."""
        here = {member.node for member in self.state.living}
        coming = sorted(set(self.local.names) - here) if self.local is not None else []
        if coming and len(here) < self.work.plan.world_size and time.monotonic() < self._hurry:
            return ClusterError(f"{', '.join(coming)} is being started again")
        return super()._lack()

    async def _come_back(self) -> tuple[str, ...]:
        """Those who are here once the first has waited long enough for the others, if they will do."""
        await self._until(lambda: any(member.before is not None for member in self.state.living))
        await asyncio.sleep(BACK_SECONDS)
        await self._until(lambda: set(self._first) <= set(self._living()) and self._lack() is None)
        log.warning("goes on with the %d of %d nodes that are here", len(self.here), self.work.plan.world_size)
        return self.here

    def _broke_off(self) -> None:
        if math.isnan(self._since):
            self._since = time.monotonic()
            self._in_vain += 1
        if self._in_vain > IN_VAIN:
            self.blame()
            why = self.losses[0][1].message if self.losses else self.trouble()[1]
            self.fail(ClusterError(f"{self._in_vain} losses in a row, and no step between them; the last: {why}"))

    def _stepped(self, step: int) -> None:
        self._step = step
        if not self._moves:  # or it is one of before
            self._before = None
        if step > self._reached:
            self._reached, self._in_vain = step, 0
        here = len(self.state.seated)
        self._is_between = len(self.state.living) > here < self.work.plan.world_size

    def _resumed(self, began: RunBegan) -> None:
        again = max(0, self._step - began.step)
        if began.origin != "memory":
            log.warning("no step is whole in memory: goes on after step %d, %d steps are lost", began.step, again)
        seconds = 0.0 if math.isnan(self._since) else time.monotonic() - self._since
        self._since = math.nan
        nodes = tuple(member.node for member in self.state.seated)
        self.pass_on(RunResumed(began.step, again, seconds, str(self.state.plan), nodes, began.origin))


def lasting(work: Workload) -> Workload:
    """The same work by ranks that outlive each other, and mirror what they hold where that is all that there is."""
    assert isinstance(work.settings, TrainSettings), "serving lasts by its own rules"
    mirrored = work.plan.world_size > 1 and can_mirror(job_of(work), work.plan.servers)
    return replace(work, settings=msgspec.structs.replace(work.settings, outlives=True, mirrored=mirrored))
