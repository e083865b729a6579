"""`RankPlacement`: which node takes which rank of the plan that was asked for, however often nodes go and come.

`RecoveringCoordinator`: a coordinator whose cluster outlives its nodes: after a loss a new epoch begins on those
that are here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from tllm.cluster.certificates import Authority
from tllm.cluster.connection import Address
from tllm.cluster.heartbeat import LATE_SECONDS, silent
from tllm.cluster.state import Member
from tllm.core.errors import ClusterError, PlanError, TllmError
from tllm.node.coordinator.cluster_options import OnProgress
from tllm.node.coordinator.coordinator import BLAME_SECONDS, Coordinator, Workload
from tllm.spec.plan import Plan


class RankPlacement:
    """A node keeps its rank for as long as it is here, and gets it back if it is still free when it returns.

    So what is left of a plan stays in order, and each node keeps most of its weights.
    """

    def __init__(self, ranks: int, first: Sequence[str] = ()) -> None:
        self._ranks = ranks
        self._own = {node: rank for rank, node in enumerate(first)}

    def fill(self, living: Sequence[str], wishes: Mapping[str, int] | None = None) -> dict[int, str]:
        """The node of each rank that has one, by rank; `living` in the order in which they joined.

        `wishes` are ranks that nodes had under another coordinator, which they get if nobody has them.
        """
        taken = {rank: node for node in living if (rank := self._own.get(node)) is not None}
        for node in living:
            wish = (wishes or {}).get(node, self._ranks)
            if node not in taken.values() and wish < self._ranks:
                taken.setdefault(wish, node)
        for node in living:
            free = [rank for rank in range(self._ranks) if rank not in taken]
            if free and node not in taken.values():
                taken[free[0]] = node
        absent = {node: rank for node, rank in self._own.items() if rank not in taken}
        self._own = absent | {node: rank for rank, node in taken.items()}
        return dict(sorted(taken.items()))


log = logging.getLogger("tllm.node")

Policy = Literal["replan", "wait"]
"""After a loss: go on with the nodes that are left, or wait until there are as many as the plan has ranks."""

WAIT_SECONDS = 120.0
"""How long the work waits for nodes that are to come, before it ends with the loss; a subclass may know better."""

RESTORE_SECONDS = 30.0
"""A node that comes back is put to use when nothing runs, or after this long: the change costs a pause."""

RETRY_SECONDS = 10.0
LOOK_SECONDS = 0.5
ATTEMPTS = 6


class RecoveringCoordinator(Coordinator):
    """Work pauses with a loss (`is_open` is False) and goes on in the next epoch, which begins as soon as it can.

    Only when nobody is there to take over is it given up, with the loss; the next node that joins opens it again.
    """

    def __init__(
        self,
        work: Workload,
        authority: Authority,
        address: Address,
        first: Sequence[str] = (),
        policy: Policy = "replan",
    ) -> None:
        self.policy = policy
        self.wait_seconds = WAIT_SECONDS
        self.is_open = False
        self.count = 0  # of ranks lost so far
        self._seats = RankPlacement(work.plan.world_size, first)
        self._barred: set[str] = set()  # came later, and could not take part
        self._formed = asyncio.Event()
        self._opened = 0.0
        self._moves = False  # to another plan
        self._before: tuple[Workload, RankPlacement] | None = None  # a move that is not yet known to go well
        super().__init__(work, authority, address, first)

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether a pause would disturb nobody."""

    @abstractmethod
    def go_on(self) -> None:
        """A new epoch is open: let the work go on in it."""

    @abstractmethod
    def give_up(self, error: TllmError) -> None:
        """Nobody is there to take over: end the work with this."""

    @abstractmethod
    def plan_on(self, taken: Mapping[int, str]) -> tuple[Plan, tuple[str, ...]]:
        """A plan for nodes that took these ranks of the one that was asked for, and those of its ranks, in order.

        PlanError where there is none, CapacityError where they lack the memory.
        """

    def move(self, plan: Plan, nodes: Sequence[str]) -> None:
        """Go on under another plan, whose ranks these nodes take in order; as before, if that cannot begin."""
        self._before = (self.work, self._seats)
        self.work = replace(self.work, plan=plan)
        self._seats = RankPlacement(plan.world_size, nodes)
        self._moves = True

    def go_back(self, why: str) -> bool:
        """Take back a move that did not go well. False where there is none to take back."""
        if self._before is None:
            return False
        moved = self.work.plan
        (self.work, self._seats), self._before = self._before, None
        self._moves = True
        log.warning("the move to plan %s failed: %s; goes back to plan %s", moved, why, self.work.plan)
        return True

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().run())
            tasks.create_task(self._keep())

    async def form(self, seconds: float | None = None, on_progress: OnProgress | None = None) -> None:
        nodes = await self.chosen(await self.wait_for_nodes(seconds), on_progress)
        if self.choice is not None:
            self._seats = RankPlacement(self.work.plan.world_size, nodes)
        await self._settle(on_progress)
        self._formed.set()

    def on_loss(self, node: str, error: TllmError) -> None:
        """Work pauses; `_keep` does the rest. A worker of this machine is started anew, another is asked for."""
        member = self.state.member(node)
        assert member is not None, "only members are lost"
        self._barred.discard(node)
        if self.local is not None and node in self.local.names:
            self.local.kill(node)
        elif self._formed.is_set():
            self.invite(1)
        if self.has_seat(member):
            self.losses.append((node, error))
            self.count += 1
            self.is_open = False

    def has_seat(self, member: Member) -> bool:
        """Whether the work waits for this node: not if it has no rank of the plan, and only lent its memory."""
        plan = self.state.plan
        return member.rank is not None and plan is not None and member.rank < plan.world_size

    def on_break(self) -> None:
        self.is_open = False

    def trouble(self) -> tuple[str, str]:
        """The node that is at fault now, and what of it; "" where all is well.

        Who is late stands before those that were lost already: it is what the others wait for.
        """
        for event in silent(self.state, time.monotonic(), LATE_SECONDS):
            return event.node, event.reason
        if self.losses:
            return self.losses[0][0], self.losses[0][1].message
        for member in self.state.ranks:
            if member.phase == "broken":
                return member.node, member.reason
        return "", ""

    def doing(self) -> str:
        """What the cluster does at the moment, in words."""
        if self.is_open:
            return f"serves, epoch {self.state.epoch}"
        if (lack := self._lack()) is not None:
            return f"waits for nodes: {lack.message}"
        phases = ", ".join(f"{member.node} {member.phase}" for member in self.state.ranks)
        return f"begins epoch {self.state.epoch}: {phases}"

    def _blamed(self, error: TllmError) -> TllmError:
        self.blame()
        return self.losses[0][1] if self.losses else error

    async def _keep(self) -> None:
        """Whenever the plan cannot go on, or more of it can be had, begin a new epoch; for ever."""
        await self._formed.wait()
        while True:
            await self._until(lambda: not self.state.is_ready or self._can_grow())
            self.is_open = False
            if not self.state.is_ready:
                await asyncio.sleep(BLAME_SECONDS)  # others may be lost with the first
            await self._enough()
            try:
                await self._settle()
            except TllmError as error:
                self._end(error)
                await self._change()

    async def _change(self) -> None:
        """Wait for nodes to go or come, or long enough to try again."""
        here = self._living()
        await self._until(lambda: self._living() != here, RETRY_SECONDS)

    async def _enough(self) -> None:
        """Wait for nodes that can take over. Where none are to come, or not in time, the work is given up."""
        until = time.monotonic() + self.wait_seconds
        while (lack := self._lack()) is not None:
            if self.fault is None and (not self._is_patient() or time.monotonic() > until):
                self._end(lack)
            await self._until(lambda: self._lack() is None, LOOK_SECONDS)

    async def _settle(self, on_progress: OnProgress | None = None) -> None:
        """Begin an epoch with those who are here, again if some are lost meanwhile, and let the work go on in it."""
        proven = {member.node for member in self.state.ranks}
        for attempt in range(1, ATTEMPTS + 1):
            plan, nodes = self._cast()
            try:
                await self.bring_up(plan, nodes, on_progress)
                break
            except TllmError as error:
                await asyncio.sleep(BLAME_SECONDS)
                if attempt < ATTEMPTS and self.go_back(error.message):
                    continue
                new = set(nodes) - proven if proven and not self.state.lost else set()
                if attempt == ATTEMPTS or not (new or self.state.lost or self._is_broken()):
                    raise
                self._barred |= new
                log.warning("epoch %d did not begin: %s", self.state.epoch, error.message)
        self.fault, self.losses = None, []
        self._moves = False
        self.is_open, self._opened = True, time.monotonic()
        self.go_on()

    def _end(self, lack: TllmError) -> None:
        """Give the work up, by the name of the node that was lost."""
        cause = self._blamed(lack)
        words = cause.message if cause is lack else f"{cause.message}; nobody can take over: {lack.message}"
        self.fault = ClusterError(words, lack.hint)
        log.error("%s", words)
        self.give_up(self.fault)

    def _cast(self) -> tuple[Plan, tuple[str, ...]]:
        """The plan for those who are here, and who takes its ranks. ClusterError or PlanError if they are too few."""
        wishes = {m.node: m.before for m in self.state.living if m.before is not None}
        taken = self._seats.fill(self._living(), wishes)
        wanted = self.work.plan.world_size
        if not taken or (self.policy == "wait" and len(taken) < wanted):
            raise ClusterError(f"{len(taken)} of {wanted} nodes are here", "let others join")
        return self.plan_on(taken)

    def _lack(self) -> TllmError | None:
        try:
            self._cast()
        except (ClusterError, PlanError) as error:
            return error
        return None

    def _living(self) -> list[str]:
        return [member.node for member in self.state.living if member.node not in self._barred]

    def _is_broken(self) -> bool:
        return any(member.phase == "broken" for member in self.state.ranks)

    def _is_patient(self) -> bool:
        """Whether nodes are to come: all that the plan needs, or workers of this machine."""
        return self.policy == "wait" or (self.local is not None and not set(self.local.names) <= set(self._living()))

    def _can_grow(self) -> bool:
        wanted, here = self.work.plan.world_size, len(self.state.seated)
        return self._moves or (self.may_pause() and min(len(self._living()), wanted) > here and self._most() > here)

    def may_pause(self) -> bool:
        """Whether a node that could be put to use is worth a pause now."""
        return self.is_idle or time.monotonic() - self._opened > RESTORE_SECONDS

    def _most(self) -> int:
        """Ranks of the plan that those who are here can have."""
        return 0 if self._lack() is not None else self._cast()[0].world_size

    async def _until(self, holds: Callable[[], bool], seconds: float = math.inf) -> None:
        """Wait until something holds, which may come with time alone, or for so long."""
        until = time.monotonic() + seconds
        while not holds() and time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self.members.until(holds)
