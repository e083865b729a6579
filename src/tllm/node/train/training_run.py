"""`TrainingRun`: a cluster that trains. It passes on the news of rank 0 and ends when every rank's run has ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence

from tllm.cluster import messages
from tllm.cluster.certificates import Authority
from tllm.cluster.channel import Act
from tllm.cluster.connection import Address
from tllm.cluster.messages import Done, Prepared, Stop
from tllm.cluster.settings import TrainSettings
from tllm.cluster.state import RankDone
from tllm.core.errors import UNREADABLE, ClusterError, TllmError
from tllm.node.coordinator.coordinator import Coordinator, Tell, Workload
from tllm.planner.cost.cache_room import check_machines
from tllm.planner.memory.training_memory import training_bytes
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan
from tllm.train.job.job import Job, decode_job
from tllm.train.job.job_parts import training_facts
from tllm.train.report.events import RunEnded, RunEvent, decode


class TrainingRun(Coordinator):
    """One rank that fails ends every other within seconds, and the run with its error."""

    def __init__(self, work: Workload, authority: Authority, address: Address, first: Sequence[str] = ()) -> None:
        self._news: asyncio.Queue[RunEvent | TllmError] = asyncio.Queue()
        self._ended: RunEnded | None = None
        self._is_stopped = False
        super().__init__(work, authority, address, first)

    async def news(self) -> AsyncGenerator[RunEvent, None]:
        """What the run tells, up to its end. Raises what a rank failed with, by the name of its node."""
        while True:
            news = await self._news.get()
            if isinstance(news, TllmError):
                raise news
            yield news
            if isinstance(news, RunEnded):
                return

    @property
    def plan(self) -> Plan:
        """The plan of the present epoch."""
        return self.state.plan or self.work.plan

    def stop(self) -> None:
        """Let every rank save after the step that it takes, and end."""
        self._is_stopped = True
        for member in self.state.ranks:
            if member.node in self.members.channels:
                self.members.channels[member.node].post(Stop())

    async def chosen(self, nodes: tuple[str, ...], tell: Tell | None = None) -> tuple[str, ...]:
        """Also checked: what nodes were given is kept to, whoever chose the plan. Copies of steps may be left out."""
        ranks = await super().chosen(nodes, tell)
        given = {member.node for member in self.state.living if member.facts.is_given}
        if given & set(ranks):
            self.check_room(self.work.plan, ranks, mirrored=False)
        return ranks

    def check_room(self, plan: Plan, nodes: Sequence[str], mirrored: bool) -> None:
        """CapacityError where these nodes lack the memory for the ranks of a plan, `mirrored` with copies of steps."""
        rooms = {member.node: member.facts.room for member in self.state.living}
        facts = training_facts(job_of(self.work), mirrored)
        ranks = training_bytes(spec_from_config(json.loads(self.work.config)), plan, facts)
        check_machines([rank.total for rank in ranks], [rooms[node] for node in nodes])

    async def form(self, seconds: float | None = None, tell: Tell | None = None) -> None:
        await super().form(seconds, tell)
        if self._is_stopped:  # meanwhile, by a node's operator
            self.stop()

    def fail(self, error: TllmError) -> None:
        """End every rank at once, and `news` with this."""
        self.fault = error
        self.members.end(error.message)
        self._news.put_nowait(error)

    def check(self, prepared: Mapping[int, Prepared]) -> None:
        """Nothing: what a rank holds is known when it has built its model."""

    def acts(self, node: str) -> Mapping[type, Act]:
        async def news(message: messages.News) -> None:
            if self.state.ranks and self.state.ranks[0].node == node:
                self.pass_on(_decoded(message, node))
                await self.members.wake()

        async def done(_: Done) -> None:
            self.members.tell(RankDone(node))
            if self.state.is_done and self._ended is not None:
                self._news.put_nowait(self._ended)

        async def stop(_: Stop) -> None:
            self.stop()

        return {**super().acts(node), messages.News: news, Done: done, Stop: stop}

    def pass_on(self, news: RunEvent) -> None:
        """Pass the news on, but for the last, which waits until every rank is done."""
        if isinstance(news, RunEnded):
            self._ended = news
        else:
            self._news.put_nowait(news)


def job_of(work: Workload) -> Job:
    """The job of work that is training."""
    assert isinstance(work.settings, TrainSettings)
    return decode_job(work.settings.job)


def is_mirrored(work: Workload) -> bool:
    """Whether each rank of work that is training has copies of others' last steps."""
    return isinstance(work.settings, TrainSettings) and work.settings.mirrored


def _decoded(message: messages.News, node: str) -> RunEvent:
    try:
        return decode(message.content)
    except UNREADABLE as error:
        raise ClusterError(f"{node} sent news that are none: {error}") from error
