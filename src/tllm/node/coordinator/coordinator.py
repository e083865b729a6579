"""`Coordinator`: keeps the cluster's state and gives every node its part; what these then do, its subclasses know."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tllm.cluster.certificates import Authority
from tllm.cluster.channel import Act, Channel
from tllm.cluster.connection import Address
from tllm.cluster.control_server import ControlServer
from tllm.cluster.heartbeat import SILENCE_SECONDS, check_lost_after
from tllm.cluster.join_token import HOUR, JoinToken, TokenBook
from tllm.cluster.messages import Assign, Findings, Load, Loaded, Outputs, Prepared, Progress, RankAddress, Start
from tllm.cluster.settings import Settings, SurveySettings
from tllm.cluster.state import ClusterState, Planned, RankLoaded, RankLoading, RankPrepared, RankReady
from tllm.core.errors import ClusterError, LinkError, TllmError
from tllm.node.coordinator.cluster_options import OnProgress
from tllm.node.coordinator.local_workers import LocalWorkers
from tllm.node.coordinator.membership import Membership
from tllm.node.coordinator.survey import Examiner, SurveyRequest, in_time
from tllm.node.coordinator.weight_registry import WeightRegistry
from tllm.node.weights.model_folder import ModelFolder
from tllm.planner.measured.survey import Survey
from tllm.spec.plan import Plan

log = logging.getLogger("tllm.node")

PREPARE_SECONDS = 60.0
LOAD_SECONDS = 120.0  # without any progress
START_SECONDS = 30.0
BLAME_SECONDS = 0.3
"""How long to wait for more after a first loss: the links of a dead node's neighbours may fail before it is missed."""


@dataclass(frozen=True)
class Workload:
    """What the cluster is to run: `config` is the text of the model's config.json; `folder` holds weights, if any.

    `allow_mixed`: nodes may run another program than the coordinator. `prepare_seconds` is for a node to leave what it
    does in an epoch that is over, and to connect its wires. A node that is silent for `lost_after` seconds is lost.
    """

    folder: Path | None
    config: str
    plan: Plan
    settings: Settings
    load_seconds: float = LOAD_SECONDS
    allow_mixed: bool = False
    prepare_seconds: float = PREPARE_SECONDS
    lost_after: float = SILENCE_SECONDS

    def __post_init__(self) -> None:
        check_lost_after(self.lost_after)


@dataclass(frozen=True)
class PlanChoice:
    """How the work is chosen when the nodes are here: what is asked of them, and what follows from their answers.

    `choose` gives the work, and who takes its ranks, in order, by the places of the nodes in the survey. `is_given`:
    it keeps the plan, for as many nodes as that has ranks, and only foretells its speed.
    """

    asked: SurveyRequest
    choose: Callable[[Survey], tuple[Workload, Sequence[int]]]
    is_given: bool = False


class Coordinator(ABC):
    """Brings nodes together for one plan. `run` must be running from before `form` until the end.

    `first` names nodes that take the first ranks, in that order; the others follow in the order in which they joined.
    """

    def __init__(self, work: Workload, authority: Authority, address: Address, first: Sequence[str] = ()) -> None:
        self.work = work
        self.fault: TllmError | None = None
        self.losses: list[tuple[str, TllmError]] = []
        self.local: LocalWorkers | None = None  # workers of this machine
        self.invite: Callable[[int], None] = lambda uses: None  # ask for so many nodes more
        self.choice: PlanChoice | None = None  # where the plan of `work` only says for how many nodes to wait
        self.survey: Survey | None = None  # by which it was
        self._examiner: Examiner | None = None
        self._first = tuple(first)
        self._folder = ModelFolder(work.folder) if work.folder is not None else None
        self._tokens = TokenBook(authority.fingerprint)
        heard = (self._on_loss, self.on_break, self._lend, work.lost_after)
        self.members = Membership(authority.cluster, self.acts, *heard)
        self.door = ControlServer(authority, self._tokens, self.members.admit, self.members.is_here, address)
        self.door.allow_mixed = work.allow_mixed
        self.origin = WeightRegistry(self._folder, self.members, self.door.own)

    @property
    def state(self) -> ClusterState:
        return self.members.state

    def token(self, uses: int = 1, seconds: float = HOUR) -> JoinToken:
        """A join token for so many nodes."""
        return self._tokens.issue(time.time(), uses, seconds)

    async def run(self) -> None:
        """Keep the door and the watch, for ever; what goes wrong with either comes out here."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.door.run())
            tasks.create_task(self.members.watch())

    async def form(self, seconds: float | None = None, on_progress: OnProgress | None = None) -> None:
        """Wait for enough nodes, `seconds` at most, and bring every rank up. Raises what any of them fails with."""
        nodes = await self.chosen(await self.wait_for_nodes(seconds), on_progress)
        await self.bring_up(self.work.plan, nodes, on_progress)

    async def chosen(self, nodes: tuple[str, ...], on_progress: OnProgress | None = None) -> tuple[str, ...]:
        """Choose the work, if it is to be chosen, by a survey of the nodes; those that take its ranks, in order."""
        if self.choice is None:
            return nodes
        nodes = self.choice.asked.ordered(nodes)
        self.survey = self.origin.survey = await self.surveyed(nodes, self.choice.asked, on_progress)
        work, ranks = await asyncio.to_thread(self.choice.choose, self.survey)
        self.take(work)
        return tuple(nodes[rank] for rank in ranks)

    def take(self, work: Workload) -> None:
        """Work that was chosen."""
        self.work = work

    async def surveyed(self, nodes: Sequence[str], asked: SurveyRequest, on_progress: OnProgress | None) -> Survey:
        """What was kept of these nodes, else what they measure now, in an epoch that is for it."""
        members = {member.node: member.facts for member in self.state.living}
        given = {node: facts.memory_bytes for node, facts in members.items()}
        if (known := asked.recalled([members[node] for node in nodes])) is not None:
            return known.within(given)
        hosts = [members[node].host_name for node in nodes]
        settings = in_time(asked.settings, hosts)
        self._examiner = Examiner(self.members, settings)
        await self.bring_up(Plan.parse(f"pp={len(nodes)}", len(nodes)), nodes, on_progress, settings)
        found = await self._examiner.survey(nodes, hosts, asked, on_progress)
        return found.within(given)

    async def bring_up(
        self, plan: Plan, nodes: Sequence[str], on_progress: OnProgress | None, survey: SurveySettings | None = None
    ) -> None:
        """Begin an epoch with this plan, whose ranks these nodes take in order. Raises what any of them fails with.

        With a `survey` the nodes do not take up the work, but measure.
        """
        self.members.tell(Planned(plan, tuple(nodes)))
        self.origin.begin()
        try:
            prepared = await self._prepare(plan, survey or self.work.settings)
            if survey is None:
                self.check(prepared)
            await self._load(on_progress)
            await self.members.each(self._start)
        except LinkError as error:
            await asyncio.sleep(2 * BLAME_SECONDS)  # a node that was lost is to be named, not its neighbour
            raise self._blamed(error) from error
        if not self.state.is_ready:
            reasons = "; ".join(member.reason for member in self.state.ranks if member.reason)
            raise ClusterError(f"a node was lost while the cluster started: {reasons}")
        log.info("cluster %s is ready, epoch %d: %s", self.state.cluster, self.state.epoch, plan)
        for words in dict.fromkeys(member.loaded.network for member in self.state.ranks if member.loaded):
            if words:
                log.info("network: %s", words)

    def _blamed(self, error: TllmError) -> TllmError:
        return self.fault or error

    @abstractmethod
    def fail(self, error: TllmError) -> None:
        """The cluster cannot go on: whoever waits for it is told this."""

    @abstractmethod
    def check(self, prepared: Mapping[int, Prepared]) -> None:
        """Refuse what the ranks are about to load, if all together it is not what they should."""

    def acts(self, node: str) -> Mapping[type, Act]:
        """What is done with a node's messages."""

        async def findings(message: Findings) -> None:
            if self._examiner is None:
                raise ClusterError(f"{node} tells what it found in a survey that there is not")
            self._examiner.take(node, message)

        async def outputs(message: Outputs) -> None:
            if self._examiner is None:
                raise ClusterError(f"{node} sends tokens, and nothing is served")

        return {**self.origin.acts(node), Findings: findings, Outputs: outputs}

    async def wait_for_nodes(self, seconds: float | None) -> tuple[str, ...]:
        """As many as the plan has ranks, those of this machine first. ClusterError if they do not come in time."""
        wanted = self.work.plan.world_size
        try:
            async with asyncio.timeout(seconds):
                await self.members.until(lambda: len(self.state.living) >= wanted)
        except TimeoutError as error:
            came = ", ".join(member.node for member in self.state.living) or "none"
            raise ClusterError(
                f"{len(self.state.living)} of {wanted} nodes joined within {seconds:g} s ({came})",
                "run the join line on the others, and see that they reach this machine",
            ) from error
        return self.here[:wanted]

    @property
    def here(self) -> tuple[str, ...]:
        """The nodes that live, those of this machine first."""
        order = {node: place for place, node in enumerate(self._first)}
        return tuple(
            sorted((member.node for member in self.state.living), key=lambda node: order.get(node, len(order)))
        )

    async def _prepare(self, plan: Plan, settings: Settings) -> dict[int, Prepared]:
        facts = [member.facts for member in self.state.ranks]
        places = tuple(RankAddress(fact.node, fact.host, fact.port) for fact in facts)
        prepared: dict[int, Prepared] = {}

        async def one(node: str, channel: Channel, rank: int) -> None:
            assign = Assign(
                cluster=self.state.cluster,
                epoch=self.state.epoch,
                rank=rank,
                plan=plan,
                places=places,
                config=self.work.config,
                settings=settings,
                folder=str(self._folder.path) if self._folder else "",
                files=self._folder.files if self._folder else (),
            )
            prepared[rank] = await channel.ask(assign, self.work.prepare_seconds)
            self.members.tell(RankPrepared(node, prepared[rank]))

        await self.members.each(one)
        return prepared

    async def _load(self, on_progress: OnProgress | None) -> None:
        async def one(node: str, channel: Channel, rank: int) -> None:
            async for news in channel.stream(Load(self.state.epoch), self.work.load_seconds):
                if isinstance(news, Progress):
                    self.members.tell(RankLoading(node, news))
                    if on_progress is not None:
                        on_progress(f"rank {rank} on {node}", news.done, news.total)
                elif isinstance(news, Loaded):
                    self.members.tell(RankLoaded(node, news))

        await self.members.each(one)

    async def _start(self, node: str, channel: Channel, rank: int) -> None:
        await channel.ask(Start(self.state.epoch), START_SECONDS)
        self.members.tell(RankReady(node))

    def _on_loss(self, node: str, error: TllmError) -> None:
        self.origin.forget(node)
        self.on_loss(node, error)

    async def _lend(self, channel: Channel, node: str) -> None:
        await self.origin.lend(channel, node)

    def on_loss(self, node: str, error: TllmError) -> None:
        """A node is gone. If it had a rank, who failed first by itself is soon known, and `fail` is told."""
        member = self.state.member(node)
        if member is None or member.rank is None:
            return
        self.losses.append((node, error))
        if len(self.losses) == 1:
            asyncio.get_running_loop().call_later(BLAME_SECONDS, self._conclude)

    def on_break(self) -> None:
        """A rank can compute no more, though its node is here and waits for another part."""
        raise AssertionError("a part that does not outlive its wires ends with them")

    def blame(self) -> None:
        """Put the node that failed first by itself before those whose links to it then broke."""
        self.losses.sort(key=lambda loss: isinstance(loss[1], LinkError))

    def _conclude(self) -> None:
        if self.losses and self.fault is None:
            self.blame()
            self.fail(self.losses[0][1])
