"""`TrainingRun`: a cluster that trains. It passes on what rank 0 reports and ends when every rank's run has ended."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence

from tllm.cluster.certificates import Authority
from tllm.cluster.channel import Act
from tllm.cluster.connection import Address
from tllm.cluster.messages import Done, News, Prepared, Stop
from tllm.cluster.settings import TrainSettings
from tllm.cluster.state import ClusterState, RankDone
from tllm.core.errors import ClusterError, TllmError, decoded
from tllm.node.coordinator.cluster_options import OnProgress
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.coordinator.workload import Workload
from tllm.node.train.role_nodes import RoleNodes
from tllm.planner.cost.cache_room import check_machines
from tllm.planner.memory.training_memory import rank_totals
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan
from tllm.training.job.job import Job, decode_job
from tllm.training.job.job_parts import shares_prompts, training_facts
from tllm.training.report.events import EVENTS, RunEnded, RunEvent


class TrainingRun:
    """A coordinator's job in which one rank that fails ends every other within seconds, and the run with its error.

    `events` is what the run reports, `roles` the nodes that teach it or sample for it.
    """

    def __init__(self, work: Workload, authority: Authority, address: Address, first: Sequence[str] = ()) -> None:
        self.fault: TllmError | None = None
        self._events: asyncio.Queue[RunEvent | TllmError] = asyncio.Queue()
        self._ended: RunEnded | None = None
        self._is_stopped = False
        self._job = job_of(work)
        self._spec = spec_from_config(json.loads(work.config))
        self.coordinator = Coordinator(self, work, authority, address, first)
        self.roles = RoleNodes(self.coordinator, self._job)

    @property
    def state(self) -> ClusterState:
        return self.coordinator.state

    @property
    def plan(self) -> Plan:
        """The plan of the present epoch."""
        return self.state.plan or self.coordinator.work.plan

    async def events(self) -> AsyncGenerator[RunEvent, None]:
        """What the run reports, up to its end. Raises what a rank failed with, by the name of its node."""
        while True:
            event = await self._events.get()
            if isinstance(event, TllmError):
                raise event
            yield event
            if isinstance(event, RunEnded):
                return

    async def form(self, seconds: float | None = None, on_progress: OnProgress | None = None) -> None:
        """Wait for enough nodes, `seconds` at most, and bring every rank up."""
        nodes = await self.choose(await self.nodes_to_begin(seconds), on_progress)
        async with self.roles.beginning():
            await self.coordinator.bring_up(self.coordinator.work.plan, nodes, on_progress)
        if self._is_stopped:  # meanwhile, by a node's operator
            self.stop()

    async def nodes_to_begin(self, seconds: float | None) -> tuple[str, ...]:
        """Enough nodes, and those that the job names for a role, which may join later than others: all of them within
        `seconds`."""
        began = time.monotonic()

        def left() -> float | None:
            return None if seconds is None else max(0.0, seconds - (time.monotonic() - began))

        nodes = await self.wait_for_nodes(seconds)
        while await self.roles.wait_for_named(left()):  # meanwhile others may have gone
            nodes = await self.wait_for_nodes(left())
        return nodes

    async def wait_for_nodes(self, seconds: float | None) -> tuple[str, ...]:
        """As many as the plan and the roles beside it want. ClusterError if they do not come in time."""
        return await self.coordinator.wait_for_nodes(seconds)

    async def choose(self, nodes: tuple[str, ...], on_progress: OnProgress | None = None) -> tuple[str, ...]:
        """Those of the nodes that take the ranks, in order, by a plan that is chosen now if none is given. Others are
        reserved for roles.

        CapacityError where nodes were given less memory than their ranks take, whoever chose the plan. Snapshot
        replicas of steps are not counted, as a run may go without them.
        """
        nodes = self._with_named(nodes)
        ranks = await self.coordinator.choose(nodes, on_progress)
        reserved = self.roles.reserve(nodes)
        ranks = tuple(node for node in ranks if node not in reserved)
        given = {member.node for member in self.state.living if member.facts.is_given}
        if given & set(ranks) and len(ranks) >= self.coordinator.work.plan.world_size:  # one cut down: in `plan_on`
            self.check_room(self.coordinator.work.plan, ranks, mirrored=False)
        return ranks

    def _with_named(self, nodes: tuple[str, ...]) -> tuple[str, ...]:
        """As many, with those that the job names for a role and that are here, though they may have joined late."""
        named = [name for one in self.roles.wanted.values() for name in one.names if name in self.coordinator.nodes]
        late = [name for name in named if name not in nodes]
        others = [node for node in nodes if node not in named]
        drop = set(others[max(1, len(others) - len(late)) :]) if late else set()
        return (*(node for node in nodes if node not in drop), *late)

    def check_room(self, plan: Plan, nodes: Sequence[str], mirrored: bool) -> None:
        """CapacityError where these nodes lack the memory for the ranks of a plan.

        `mirrored`: each rank also keeps in-memory snapshots of another one's steps.
        """
        known = {member.node: member.facts for member in self.state.living}
        facts = training_facts(self._job, mirrored, shares_prompts=shares_prompts(self._job, self._spec))
        needs = rank_totals(self._spec, plan, facts, tuple(known[node].host_name for node in nodes))
        check_machines(needs, [known[node].room for node in nodes])

    def stop(self) -> None:
        """Let every rank save after the step that it takes, and end."""
        self._is_stopped = True
        channels = self.coordinator.members.channels
        for member in self.state.ranks:
            if member.node in channels:
                channels[member.node].post(Stop())

    def fail(self, error: TllmError) -> None:
        """End every rank at once, and `events` with this."""
        self.fault = error
        self.coordinator.members.end(error.message)
        self._events.put_nowait(error)

    def check(self, prepared: Mapping[int, Prepared]) -> None:
        """Nothing: what a rank holds is known when it has built its model. Rank 0 is told whom it may ask."""
        self.roles.tell()

    def adopt(self, work: Workload) -> Workload:
        self._job = self.roles.job = job_of(work)
        return work

    def acts(self, node: str) -> Mapping[type, Act]:
        self.roles.welcome(node)

        async def report(message: News) -> None:
            if self.state.ranks and self.state.ranks[0].node == node:
                self.publish(decoded(message.content, EVENTS, f"{node} sent news that are none", ClusterError))
                await self.coordinator.members.notify()

        async def done(_: Done) -> None:
            self.coordinator.members.record(RankDone(node))
            if self.state.is_done and self._ended is not None:
                self.coordinator.members.is_unfinished = not self._ended.final
                self._events.put_nowait(self._ended)

        async def stop(_: Stop) -> None:
            self.stop()

        return {News: report, Done: done, Stop: stop}

    def publish(self, event: RunEvent) -> None:
        """Pass an event on to `events`, but for the last, which waits until every rank is done."""
        if isinstance(event, RunEnded):
            self._ended = event
        else:
            self._events.put_nowait(event)


def job_of(work: Workload) -> Job:
    """The job of work that is training."""
    assert isinstance(work.settings, TrainSettings)
    return decode_job(work.settings.job)


def is_mirrored(work: Workload) -> bool:
    """Whether each rank of work that is training keeps in-memory snapshots of another one's last steps."""
    return isinstance(work.settings, TrainSettings) and work.settings.mirrored
