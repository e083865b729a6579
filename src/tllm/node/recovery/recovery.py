"""`Recovery`: lets a cluster outlive its nodes. After a loss a new epoch begins on those that are left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from tllm.cluster.heartbeat import silent
from tllm.cluster.state import Member, by_machine
from tllm.core.errors import ClusterError, PlanError, TllmError
from tllm.node.coordinator.cluster_options import OnProgress
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.coordinator.job import ClusterJob
from tllm.node.coordinator.losses import BLAME_SECONDS, Loss, Losses
from tllm.node.recovery.growth import Growth
from tllm.node.recovery.left_out import LeftOut
from tllm.node.recovery.plan_move import PlanMove
from tllm.node.recovery.rank_placement import RankPlacement
from tllm.spec.plan import Plan

log = logging.getLogger("tllm.node")

Policy = Literal["replan", "wait"]
"""After a loss: go on with the nodes that are left, or wait until there are as many as the plan has ranks."""

WAIT_SECONDS = 120.0
RESTORE_SECONDS = 30.0
RETRY_SECONDS = 10.0
"""An epoch that could not begin is tried again after so long, or as soon as nodes go or come."""

LOOK_SECONDS = 0.5
GATHER_SECONDS = 2e-5
"""For each node: news that come within so long are looked at together. A look at n nodes takes about as long as n of
them, so that it never takes more than half of the coordinator's time, however many nodes come or go at once."""

ATTEMPTS, MOST_ATTEMPTS = 6, 40
"""Epochs that are begun after one loss, each after another failed, before the work is given up: without those that end
with the loss of another node, and with them. Of 16,384 nodes one may well die while each of six in a row begins."""


@dataclass(frozen=True)
class Patience:
    """How long a cluster waits for what, in seconds.

    wait: for nodes that are to come, before the work is given up.
    restore: a node that comes back is put to use when the job is idle, or after this long in an epoch: the change
        costs a pause. Infinite: only when the job is idle.
    local: after a loss, for workers of this machine that are being started again, before going on without them.
    """

    wait: float = WAIT_SECONDS
    restore: float = RESTORE_SECONDS
    local: float = 0.0


class RecoverableJob(ClusterJob, Protocol):
    """A job that can go on after it was interrupted."""

    @property
    def is_idle(self) -> bool:
        """Whether a pause would disturb nobody."""

    def plan_on(self, taken: Mapping[int, str]) -> tuple[Plan, tuple[str, ...]]:
        """A plan for nodes that took these ranks of the one that was asked for, and those of its ranks, in order.

        PlanError where there is none, CapacityError where they lack the memory.
        """

    def before_epoch(self, plan: Plan, nodes: Sequence[str]) -> None:
        """An epoch with this plan on these nodes is about to begin. Raises why it must not."""

    def resume(self) -> None:
        """A new epoch is open: clears `fault` and lets the work go on in it."""

    def give_up(self, error: TllmError) -> None:
        """Nobody is there to take over: sets `fault` and ends the work with this."""

    def survives(self, error: TllmError) -> bool:
        """Whether the work can go on after a rank was lost by this. If not, the job has failed with it by itself."""

    def interrupted(self, loss: Loss | None) -> None:
        """The work pauses, by a loss or, with None, as the links of a rank broke."""


class _Attempts:
    """Epochs that did not begin after one loss, and the nodes that were lost with them."""

    def __init__(self) -> None:
        self._all = self._unexplained = 0
        self._lost: set[str] = set()

    def failed(self, lost: set[str]) -> None:
        """One more did not begin; these nodes of it are lost, or have come back anew."""
        self._all += 1
        self._unexplained += lost <= self._lost
        self._lost |= lost

    @property
    def are_over(self) -> bool:
        return self._unexplained >= ATTEMPTS or self._all >= MOST_ATTEMPTS


class _Opened(NamedTuple):
    """The epoch that opened last, and when, by `Membership.now`."""

    epoch: int = 0
    at: float = 0.0


class Recovery:
    """Work pauses with a loss (`is_open` is False) and goes on in the next epoch, which begins as soon as it can.

    Only when nobody is there to take over is it given up, with the loss; the next node that joins opens it again.
    It is the coordinator's `LossPolicy`.
    """

    def __init__(
        self, job: RecoverableJob, coordinator: Coordinator, policy: Policy, patience: Patience | None = None
    ) -> None:
        self._job, self._coordinator = job, coordinator
        self.policy = policy
        self.patience = patience or Patience()
        self.move = PlanMove(coordinator)
        self.losses = Losses()
        self.is_open = False
        self.left_out = LeftOut(coordinator.members.now, lambda: [one.node for one in coordinator.state.living])
        self.growth = Growth(coordinator.members.now)
        self._formed = asyncio.Event()
        self._opened = _Opened()
        self._local_until = 0.0  # until when local workers are waited for
        coordinator.loss_policy = self

    @property
    def lost_ranks(self) -> int:
        """How many ranks were lost so far."""
        return self.losses.total

    async def begin(self, nodes: Sequence[str], on_progress: OnProgress | None = None) -> None:
        """Begin the first epoch. If the plan was chosen, these nodes take its ranks in order."""
        if self._coordinator.selection.choice is not None:
            self.move.placement = RankPlacement(self._coordinator.work.plan.world_size, nodes)
        await self.begin_epoch(on_progress)
        self._formed.set()
        self._coordinator.invite_missing()  # for those that were lost while it began

    def take_up(self) -> None:
        """Let `run` begin an epoch with the nodes that are here, which another coordinator had before."""
        self._formed.set()

    async def run(self) -> None:
        """Whenever the plan cannot go on, or more of it can be had, begin a new epoch; for ever."""
        await self._formed.wait()
        while True:
            await self.until(lambda: not self._coordinator.state.is_ready or self.can_grow())
            self.is_open = False
            if not self._coordinator.state.is_ready:
                await asyncio.sleep(BLAME_SECONDS)  # others may be lost with the first
            await self._wait_for_enough()
            try:
                await self.begin_epoch()
            except TllmError as error:
                self._give_up(error)
                await self._wait_for_change()

    async def begin_epoch(self, on_progress: OnProgress | None = None) -> None:
        """Begin an epoch with those who are here, again if some are lost meanwhile, and let the work go on in it."""
        coordinator = self._coordinator
        proven = {member.node for member in coordinator.state.ranks}
        attempts = _Attempts()
        while True:
            plan, nodes = self._assign_ranks()
            before, began = coordinator.state.epoch, coordinator.members.now()
            try:
                self._job.before_epoch(plan, nodes)
                await coordinator.bring_up(plan, nodes, on_progress)
                break
            except TllmError as error:
                await asyncio.sleep(BLAME_SECONDS)
                lost, gone = {member.node for member in coordinator.state.lost}, self._gone(nodes, before)
                attempts.failed(lost | gone)
                if attempts.are_over or not (self.move.take_back(error.message) or self._leave_out()):
                    new = set(nodes) - proven if proven and not lost else set()
                    if attempts.are_over or not (new or lost or gone or self._is_broken()):
                        raise
                    for node in new:
                        self.left_out.note((node,), error.message)
                    log.warning("epoch %d did not begin: %s", coordinator.state.epoch, error.message)
                if self._formed.is_set():  # nobody waits longer for the first epoch than until its nodes were here
                    await self._wait_for_enough()
        self.losses.clear()
        self.move.is_pending = False
        self.is_open, self._opened = True, _Opened(coordinator.state.epoch, coordinator.members.now())
        self.growth.opened(self._opened.at - began)
        self._job.resume()

    def on_loss(self, node: str, error: TllmError) -> None:
        """The work pauses; `run` does the rest. A worker of this machine is started anew, another is asked for."""
        member = self._coordinator.state.member(node)
        assert member is not None, "only members are lost"
        has_rank = self._computes(member)
        if has_rank and not self._job.survives(error):
            return
        self.left_out.forget(node)
        if self._coordinator.local is not None and node in self._coordinator.local.names:
            self._coordinator.local.kill(node)
        elif self._formed.is_set():
            self._invite_another()
        if has_rank:
            loss = Loss(node, error)
            self.losses.add(loss)
            self.is_open = False
            self._local_until = self._coordinator.members.now() + self.patience.local
            self._job.interrupted(loss)

    def on_break(self) -> None:
        self.is_open = False
        self._job.interrupted(None)

    def blamed(self, error: TllmError) -> TllmError:
        cause = self.losses.cause()
        return cause.error if cause is not None else error

    def trouble(self) -> tuple[str, str]:
        """The node that is at fault now, and what of it; "" where all is well.

        Who is late stands before those that were lost already: it is what the others wait for. Who is left out stands
        last: nobody waits for it.
        """
        members = self._coordinator.members
        for event in silent(self._coordinator.state, members.now(), members.interval.late_after):
            return event.node, event.reason
        if (loss := self.losses.first) is not None:
            return loss.node, loss.error.message
        for member in self._coordinator.state.ranks:
            if member.phase in ("broken", "refused"):
                return member.node, member.reason
        for node, why in self.left_out.nodes().items():
            return node, f"{node} is left out: {why}"
        return "", ""

    def doing(self) -> str:
        """What the cluster does at the moment, in words."""
        state = self._coordinator.state
        if self.is_open:
            return f"serves, epoch {state.epoch}"
        if (lack := self.lack()) is not None:
            return f"waits for nodes: {lack.message}"
        if not state.ranks or state.epoch == self._opened.epoch:
            return f"prepares epoch {state.epoch + 1}"
        phases = ", ".join(f"{member.node} {member.phase}" for member in state.ranks)
        return f"begins epoch {state.epoch}: {phases}"

    def lack(self) -> TllmError | None:
        """Why no epoch can begin with the nodes that are here; None if one can."""
        if coming := self._coming():
            return ClusterError(f"{', '.join(coming)} is being started again")
        try:
            self._assign_ranks()
        except (ClusterError, PlanError) as error:
            return error
        return None

    def living(self) -> list[str]:
        """The nodes that may take a rank, in the order in which they joined, those of one machine together."""
        living, out = by_machine(self._coordinator.state.available), self.left_out.nodes()
        return [member.node for member in living if member.node not in out]

    def can_grow(self) -> bool:
        """Whether an epoch should begin although this one goes on: to move, or with more ranks of the plan."""
        if self.move.is_pending:
            return True
        wanted, seated = self._coordinator.work.plan.world_size, self._coordinator.state.seated_count
        return self._may_pause() and min(len(self.living()), wanted) > seated and self._most_ranks() > seated

    def is_growth_due(self) -> bool:
        """Whether more ranks of the plan can be had, and have been missed for so long that they are worth a pause."""
        state = self._coordinator.state
        has_more = state.living_count > state.seated_count < self._coordinator.work.plan.world_size
        more = max(self._most_ranks() - state.seated_count, 0) if has_more else 0
        return self.growth.is_worth(state.seated_count, more)

    async def until(self, holds: Callable[[], bool], seconds: float = math.inf) -> None:
        """Wait until something holds, which may come with time alone, or for so long."""
        members = self._coordinator.members
        deadline = members.now() + seconds
        while not holds() and members.now() < deadline:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await members.news()
            await asyncio.sleep(GATHER_SECONDS * members.state.living_count)

    async def _wait_for_change(self) -> None:
        """Wait for nodes to go or come, or long enough to try again."""
        here = self.living()
        await self.until(lambda: self.living() != here, RETRY_SECONDS)

    async def _wait_for_enough(self) -> None:
        """Wait for nodes that can take over. Where none are to come, or not in time, the work is given up."""
        deadline = self._coordinator.members.now() + self.patience.wait
        while (lack := self.lack()) is not None:
            if self._job.fault is None and (not self._is_patient() or self._coordinator.members.now() > deadline):
                self._give_up(lack)
            await self.until(lambda: self.lack() is None, LOOK_SECONDS)

    def _give_up(self, lack: TllmError) -> None:
        """Give the work up, by the name of the node that was lost."""
        cause = self.blamed(lack)
        words = cause.message if cause is lack else f"{cause.message}; nobody can take over: {lack.message}"
        log.error("%s", words)
        self._job.give_up(ClusterError(words, lack.hint))

    def _leave_out(self) -> bool:
        """Give nodes that could not take their parts none for a while; whether an epoch can begin without them. Those
        that the first epoch was to begin with are not left out: whoever started them is to hear of it."""
        if not self._formed.is_set():
            return False
        before, faults = set(self.left_out.nodes()), self.left_out.faults
        self.left_out.add(self._coordinator.state.ranks)
        out = {node: why for node, why in self.left_out.nodes().items() if node not in before}
        if not out or self.lack() is not None:
            self.left_out.faults = faults
            return False
        for node, why in out.items():
            log.warning("leaves %s out of epoch %d: %s", node, self._coordinator.state.epoch + 1, why)
        return True

    def _assign_ranks(self) -> tuple[Plan, tuple[str, ...]]:
        """The plan for those who are here, and who takes its ranks. ClusterError or PlanError if they are too few."""
        wishes = {m.node: m.before for m in self._coordinator.state.living if m.before is not None}
        taken = self.move.placement.fill(self.living(), wishes)
        wanted = self._coordinator.work.plan.world_size
        if not taken or (self.policy == "wait" and len(taken) < wanted):
            raise ClusterError(f"{len(taken)} of {wanted} nodes are here", "let others join")
        return self._job.plan_on(taken)

    def _invite_another(self) -> None:
        """Ask for a node from elsewhere. The work goes on where nobody can be asked, as when a disk takes no file."""
        try:
            self._coordinator.invite(1)
        except TllmError as error:
            log.warning("no other node is asked for: %s", error.message)

    def _computes(self, member: Member) -> bool:
        """Whether the work waits for this node: not if it has no rank of the plan, and only lent its memory."""
        plan = self._coordinator.state.plan
        return member.rank is not None and plan is not None and member.rank < plan.world_size

    def _gone(self, nodes: Sequence[str], before: int) -> set[str]:
        """Of the nodes that were to begin the epoch after this one those that are lost, or have come anew by the same
        name since it began."""
        state = self._coordinator.state
        has_begun = state.epoch > before
        return set(nodes) - {member.node for member in state.living if member.rank is not None or not has_begun}

    def _is_broken(self) -> bool:
        return any(member.phase == "broken" for member in self._coordinator.state.ranks)

    def _is_patient(self) -> bool:
        """Whether nodes are to come: all that the plan needs, or workers of this machine."""
        local, out = self._coordinator.local, self.left_out.nodes()
        has_left_out = local is not None and not out.keys().isdisjoint(local.names)
        return self.policy == "wait" or has_left_out or bool(self._restarting())

    def _restarting(self) -> list[str]:
        """Workers of this machine that are not here, and are being started again."""
        local, here = self._coordinator.local, {member.node for member in self._coordinator.state.living}
        return sorted(set(local.names) - here) if local is not None else []

    def _may_pause(self) -> bool:
        """Whether a node that could be put to use is worth a pause now."""
        return self._job.is_idle or self._coordinator.members.now() - self._opened.at > self.patience.restore

    def _most_ranks(self) -> int:
        """Ranks of the plan that those who are here can have."""
        if self._coming():
            return 0
        try:
            return self._assign_ranks()[0].world_size
        except (ClusterError, PlanError):
            return 0

    def _coming(self) -> list[str]:
        """Workers of this machine that are being started again, and are waited for as the plan lacks nodes."""
        is_short = len(self._coordinator.state.available) < self._coordinator.work.plan.world_size
        return self._restarting() if is_short and self._coordinator.members.now() < self._local_until else []
