"""`TrainingRun`: a cluster that trains. It passes on the news of rank 0 and ends when every rank's run has ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec

from tllm.cluster import messages
from tllm.cluster.channel import Act
from tllm.cluster.identity import Authority
from tllm.cluster.messages import Done, Prepared, Stop
from tllm.cluster.settings import TrainSettings
from tllm.cluster.state import RankDone
from tllm.cluster.wire import Address
from tllm.ground.decode import UNREADABLE
from tllm.ground.errors import ClusterError, PlanError, TllmError
from tllm.node.cluster import LOOPBACK, Invite, forming, local_names, open_authority
from tllm.node.coordinator import Choice, Coordinator, Tell, Work
from tllm.node.environment import Launched
from tllm.node.facts import reachable
from tllm.node.meeting import MEET_SECONDS, addresses_of, announced, meeting_file, node_of, threads_of
from tllm.spec.model import ModelSpec
from tllm.spec.plan import Plan
from tllm.train.job_file import ResolvedJob
from tllm.train.news import Ended, News, decode

LINK_SECONDS = (
    600.0  # a microbatch of a large model on a slow machine, or a corpus that rank 0 reads for the first time
)


class TrainingRun(Coordinator):
    """One rank that fails ends every other within seconds, and the run with its error."""

    def __init__(self, work: Work, authority: Authority, address: Address, first: Sequence[str] = ()) -> None:
        self._news: asyncio.Queue[News | TllmError] = asyncio.Queue()
        self._ended: Ended | None = None
        self._is_stopped = False
        super().__init__(work, authority, address, first)

    async def news(self) -> AsyncGenerator[News, None]:
        """What the run tells, up to its end. Raises what a rank failed with, by the name of its node."""
        while True:
            news = await self._news.get()
            if isinstance(news, TllmError):
                raise news
            yield news
            if isinstance(news, Ended):
                return

    def stop(self) -> None:
        """Let every rank save after the step that it takes, and end."""
        self._is_stopped = True
        for member in self.state.ranks:
            if member.node in self.members.channels:
                self.members.channels[member.node].post(Stop())

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
                self._take(_decoded(message, node))

        async def done(_: Done) -> None:
            self.members.tell(RankDone(node))
            if self.state.is_done and self._ended is not None:
                self._news.put_nowait(self._ended)

        async def stop(_: Stop) -> None:
            self.stop()

        return {**super().acts(node), messages.News: news, Done: done, Stop: stop}

    def _take(self, news: News) -> None:
        """Pass the news on, but for the last, which waits until every rank is done."""
        if isinstance(news, Ended):
            self._ended = news
        else:
            self._news.put_nowait(news)


@contextlib.asynccontextmanager
async def open_training(
    resolved: ResolvedJob,
    plan: Plan,
    config: str,
    spec: ModelSpec,
    *,
    local: int | None = None,
    threads: int = 0,
    address: Address = LOOPBACK,
    authority: Path | None = None,
    allow_mixed: bool = False,
    invite: Invite | None = None,
    tell: Tell | None = None,
    join_seconds: float | None = None,
    link_seconds: float = LINK_SECONDS,
    choice: Choice | None = None,
) -> AsyncIterator[TrainingRun]:
    """A training run whose ranks are ready to take their first step, ended with the block; `news` is to be followed.

    `config` is the text of the model's config.json, which `spec` was read from. The rest is as for `open_cluster`.
    """
    work = work_of(resolved, plan, config, spec, link_seconds, allow_mixed)
    nodes = local_names(plan, local)
    run = TrainingRun(work, await open_authority(authority), address, nodes)
    run.choice = choice
    async with forming(run, nodes, reachable(address[0]), threads, invite, tell, join_seconds):
        yield run


@contextlib.asynccontextmanager
async def open_launched(
    launched: Launched,
    resolved: ResolvedJob,
    plan: Plan,
    config: str,
    spec: ModelSpec,
    *,
    threads: int = 0,
    allow_mixed: bool = False,
    tell: Tell | None = None,
    link_seconds: float = LINK_SECONDS,
) -> AsyncIterator[TrainingRun]:
    """As `open_training`, in the process of rank 0 among those that a launcher has started.

    It keeps the coordinator, and starts the worker of rank 0 beside itself; the others call `meeting.work_launched`.
    """
    if plan.world_size != launched.world_size:
        raise PlanError(
            f"the plan {plan} has {plan.world_size} ranks and the launcher started {launched.world_size} processes",
            "start as many as the plan has ranks, or change the plan",
        )
    work = work_of(resolved, plan, config, spec, link_seconds, allow_mixed)
    nodes = [node_of(rank) for rank in range(plan.world_size)]
    listen, host = addresses_of(launched)
    run = TrainingRun(work, await open_authority(None), (listen, 0), nodes)
    file = meeting_file(launched, Path(resolved.job.output_dir))
    with contextlib.ExitStack() as told:

        def invite(address: str, token: str) -> None:
            told.enter_context(announced(file, address, token))

        async with forming(run, nodes[:1], host, threads or threads_of(launched), invite, tell, MEET_SECONDS):
            told.close()  # everybody is here
            yield run


def work_of(
    resolved: ResolvedJob, plan: Plan, config: str, spec: ModelSpec, link_seconds: float, allow_mixed: bool = False
) -> Work:
    """What to train, as every rank is told it."""
    plan.check(spec.num_layers)
    job = resolved.job
    folder = Path(job.model_name_or_path) if job.model_name_or_path else None
    settings = TrainSettings(job=msgspec.json.encode(job).decode(), threads=0, link_seconds=link_seconds)
    return Work(folder, config, plan, settings, load_seconds=link_seconds, allow_mixed=allow_mixed)


def _decoded(message: messages.News, node: str) -> News:
    try:
        return decode(message.content)
    except UNREADABLE as error:
        raise ClusterError(f"{node} sent news that are none: {error}") from error
