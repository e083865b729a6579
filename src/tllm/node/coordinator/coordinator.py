"""`Coordinator`: keeps the cluster's state and assigns ranks to nodes. What the nodes then do is decided by its job."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol

from tllm.cluster.certificates import Authority
from tllm.cluster.channel import Act, Channel
from tllm.cluster.connection import Address
from tllm.cluster.consensus.replica import Deposed
from tllm.cluster.consensus.replicated_state import AnyEntry
from tllm.cluster.control_server import ControlServer
from tllm.cluster.http_messages import ServesHttp
from tllm.cluster.join_token import JoinToken, TokenBook, TokenRecord
from tllm.cluster.messages import Assign, Load, Loaded, Prepared, Progress, RankAddress, Start
from tllm.cluster.settings import Settings, SurveySettings
from tllm.cluster.state import ClusterState, Planned, RankLoaded, RankLoading, RankPrepared, RankReady, by_machine
from tllm.core.errors import ClusterError, LinkError, TllmError, counted
from tllm.node.coordinator.cluster_options import OnProgress
from tllm.node.coordinator.job import ClusterJob
from tllm.node.coordinator.losses import BLAME_SECONDS, EndOnLoss, LossPolicy
from tllm.node.coordinator.membership import Membership
from tllm.node.coordinator.plan_selection import PlanSelection
from tllm.node.coordinator.weight_registry import WeightRegistry
from tllm.node.coordinator.workload import Workload
from tllm.node.sources.local_workers import LocalWorkers
from tllm.node.sources.node_source import Invitation, JoinLine
from tllm.node.weights.hub_chunks import HubChunks
from tllm.node.weights.hub_folder import HubFolder
from tllm.node.weights.model_folder import ModelFolder
from tllm.server.stored.stored_streams import StoredStreams
from tllm.spec.plan import Plan
from tllm.weights.chunk_cache import ChunkCache

log = logging.getLogger("tllm.node")

START_SECONDS = 30.0


class Replication(Protocol):
    """Other processes that know what this coordinator knows, so that one of them can take its place."""

    async def run(self) -> None:
        """Runs beside the coordinator, and raises when another has taken its place."""

    async def begin_epoch(self, epoch: int, plan: Plan, nodes: Sequence[str]) -> None:
        """Agree on an epoch before anybody has a part in it. Raises where this coordinator is none any more."""

    async def propose(self, entry: AnyEntry) -> None:
        """Agree on an entry: when this returns, every later coordinator has it. Raises where this one is none any
        more."""

    def keep_replies(self, streams: StoredStreams) -> None:
        """Let every later coordinator have these replies, and readers see of them what is agreed on."""

    async def hand_over(self, leaving: Sequence[str]) -> bool:
        """Let another process coordinate, under which these nodes are not waited for; whether this one does no more."""

    async def find_successor(self, seconds: float) -> Address | None:
        """Once another process has taken this one's place, or may: look for it so long; where it coordinates."""

    async def end(self) -> None:
        """The cluster ends, and nobody is to take over."""

    def status(self) -> Mapping[str, Any]:
        """Who they are, for JSON."""


class Coordinator:
    """Brings nodes together for one plan: waits for them, assigns ranks, and begins epochs in which they compute.

    `run` must be running from before the first wait for nodes until the end. `first` names nodes that take the first
    ranks, in that order; the others follow in the order in which they joined.

    It owns the parts that the job and the rest of the coordinator's process use:

    members: who is here, one channel to each node, and the cluster's state.
    control_server: the port on which nodes join.
    weights: which node has which part of the model's files.
    selection: chooses plan and nodes where no plan is given.
    loss_policy: what to do about lost nodes; ends the job with the first one, unless it is replaced.
    local: the workers of this machine, None where there are none.
    invitation: what brings nodes from elsewhere, None where they come by themselves.
    replication: replicas of the state on other nodes; None where there are none.
    tokens: the join tokens that are open.
    """

    def __init__(
        self, job: ClusterJob, work: Workload, authority: Authority, address: Address, first: Sequence[str] = ()
    ) -> None:
        self.job = job
        self.work = work
        self.local: LocalWorkers | None = None
        self.invitation: Invitation | None = None
        self.first = tuple(first)
        self.replication: Replication | None = None
        self.tokens = TokenBook(authority.fingerprint)
        callbacks = self._acts, self._on_loss, self._on_break, self._serve_chunks
        self.members = Membership(authority.cluster, *callbacks, work.lost_after)
        self.members.interval.expected = work.nodes
        self.loss_policy: LossPolicy = EndOnLoss(job, self.members)
        self.control_server = ControlServer(authority, self.tokens, self.members, address)
        self.control_server.allow_mixed = work.allow_mixed
        self.tokens.on_stale = self.invite_missing
        server = self.control_server
        self.weights = WeightRegistry(_model_folder(work), self.members, server.own, server.identity)
        self.selection = PlanSelection(self.members, self.weights, self.bring_up)

    @property
    def state(self) -> ClusterState:
        return self.members.state

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that may have a rank: those of `first` in their order, and then the others by machines."""
        order = {node: place for place, node in enumerate(self.first)}
        available = [member.node for member in by_machine(self.state.available)]
        return tuple(sorted(available, key=lambda node: order.get(node, len(order))))

    def token(self, uses: int = 1) -> JoinToken:
        """A join token for so many nodes, good for an hour."""
        return self.tokens.issue(time.time(), uses)

    def invite(self, count: int) -> None:
        """Ask for so many nodes more, from elsewhere."""
        if self.invitation is not None:
            self.invitation.tokens.append(token := self.token(count))
            self.invitation.source.start(count, self.invitation.address, str(token))

    def invite_missing(self) -> None:
        """Say the line anew where nodes are missing that no good token is out for: when somebody whose token is good no
        more wants to join, and when the work has begun. A node may have used its token up and have failed since."""
        if self.invitation is None or not isinstance(self.invitation.source, JoinLine):
            return
        here = sum(member.node not in self.control_server.own for member in self.state.living)
        missing = self.invitation.nodes - here - self.tokens.open_uses(self.invitation.tokens, time.time())
        if missing > 0:
            self.invite(missing)

    async def run(self) -> None:
        """Serve the control port, watch heartbeats and mind losses, for ever. Raises what any of these fails with:
        Deposed where another process coordinates, which this one lets do so where its own system fails it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.control_server.run())
                tasks.create_task(self.members.watch())
                tasks.create_task(self.loss_policy.run())
                if self.replication is not None:
                    tasks.create_task(self.replication.run())
        except ExceptionGroup as group:
            error: Exception = group
            while isinstance(error, ExceptionGroup):  # faults of a connection come in groups of their own
                error = error.exceptions[0]
            is_refused = isinstance(error, OSError) and not isinstance(error, TimeoutError | ConnectionError)
            if is_refused and await self.hand_over():
                why = getattr(error, "strerror", None) or str(error)
                raise Deposed(
                    f"this process coordinates no more, as its system refuses it something: {why}",
                    "another machine of the cluster does; see `tllm status` there",
                ) from error
            if isinstance(error, Deposed):
                self.let_go()
                raise error from None
            raise

    async def form(self, seconds: float | None = None, on_progress: OnProgress | None = None) -> None:
        """Wait for enough nodes, `seconds` at most, and bring every rank up. Raises what any of them fails with."""
        nodes = await self.choose(await self.wait_for_nodes(seconds), on_progress)
        await self.bring_up(self.work.plan, nodes, on_progress)

    async def wait_for_nodes(self, seconds: float | None) -> tuple[str, ...]:
        """As many as the work is for, those of this machine first. ClusterError if they do not come in time."""
        wanted = self.work.nodes
        try:
            async with asyncio.timeout(seconds):
                await self.members.until(lambda: self.state.living_count >= wanted)
        except TimeoutError as error:
            came = ", ".join(member.node for member in self.state.living) or "none"
            raise ClusterError(
                f"{self.state.living_count} of {counted(wanted, 'node')} joined within {seconds:g} s ({came})",
                "run the join line on the others, and see that they reach this machine",
            ) from error
        return self.nodes[:wanted]

    async def choose(self, nodes: tuple[str, ...], on_progress: OnProgress | None = None) -> tuple[str, ...]:
        """Choose the work, if it is to be chosen, by a survey of the nodes; those that take its ranks, in order."""
        work, ranks = await self.selection.choose(nodes, on_progress)
        if work is not None:
            self.work = self.job.adopt(work)
        return ranks

    async def bring_up(
        self,
        plan: Plan,
        nodes: Sequence[str],
        on_progress: OnProgress | None,
        survey: SurveySettings | None = None,
    ) -> None:
        """Begin an epoch with this plan, whose ranks these nodes take in order. Raises what any of them fails with.

        With `survey` settings the nodes do not take up the work, but measure.
        """
        await self._agree(plan, nodes)
        self.members.record(Planned(plan, tuple(nodes)))
        self.weights.begin()
        try:
            prepared = await self._prepare(plan, survey or self.work.settings)
            if survey is None:
                self.job.check(prepared)
            await self._load(on_progress)
            await self.members.each(self._start)
        except LinkError as error:
            await asyncio.sleep(2 * BLAME_SECONDS)  # a node that was lost is to be named, not its neighbour
            raise self.loss_policy.blamed(error) from error
        if not self.state.is_ready:
            reasons = "; ".join(member.reason for member in self.state.ranks if member.reason)
            raise ClusterError(f"a node was lost while the cluster started: {reasons}")
        if survey is not None:
            log.info("%d nodes and the links between them are measured, to choose a plan", len(nodes))
            return
        log.info("cluster %s is ready, epoch %d: %s", self.state.cluster, self.state.epoch, plan)
        for words in dict.fromkeys(member.loaded.network for member in self.state.ranks if member.loaded):
            if words:
                log.info("network: %s", words)

    def resume(self, epoch: int, tokens: Iterable[TokenRecord]) -> None:
        """Go on from another coordinator's latest epoch, with the join tokens that it has given out."""
        self.members.resume(epoch)
        self.tokens.restore(tokens)

    @property
    def can_hand_over(self) -> bool:
        """Whether another process may take this one's place."""
        return self.replication is not None

    async def hand_over(self, leaving: Sequence[str] = ()) -> bool:
        """Let another process take this one's place, and let go of all nodes, which go to it. Workers of this machine
        and `leaving` nodes end with this process. False where nobody could, and nothing has changed."""
        if self.replication is None or not await self.replication.hand_over(leaving):
            return False
        self.let_go()
        return True

    async def find_successor(self, deposed: Deposed, seconds: float) -> None:
        """Once this process was deposed, look so long for the one that coordinates now, and let the error name it."""
        assert self.replication is not None, "nobody else deposes"
        deposed.was_sought = True
        log.warning("looks for the process that coordinates now, for %g s, to join it as a node", seconds)
        deposed.successor = await self.replication.find_successor(seconds)
        if deposed.successor is None:
            log.error("no other process was found within %g s that coordinates this cluster: ends", seconds)

    def let_go(self) -> None:
        """Of all nodes, which go to another coordinator, but for workers of this machine."""
        self.members.abandon()
        if self.local is not None:
            self.local.renew_no_more()

    async def _agree(self, plan: Plan, nodes: Sequence[str]) -> None:
        """Let the replicas, if there are any, know of the next epoch before anybody has a part in it."""
        epoch = 0
        while self.replication is not None and epoch != self.state.epoch + 1:  # a node may come with a later one
            epoch = self.state.epoch + 1
            await self.replication.begin_epoch(epoch, plan, nodes)
        if gone := set(nodes) - {member.node for member in self.state.living}:
            raise ClusterError(f"{', '.join(sorted(gone))} went away before epoch {self.state.epoch + 1} began")

    def _acts(self, node: str) -> Mapping[type, Act]:
        """What to do with a node's messages."""

        async def has_no_model(_: ServesHttp) -> None:
            log.warning("%s would serve HTTP, and this cluster serves no requests", node)

        return {ServesHttp: has_no_model, **self.weights.acts(node), **self.selection.acts(node), **self.job.acts(node)}

    async def _serve_chunks(self, channel: Channel, node: str) -> None:
        """A node has opened a second connection, to read weights on."""
        await self.weights.serve_chunks(channel, node)

    def _on_loss(self, node: str, error: TllmError) -> None:
        """A node is gone."""
        self.weights.forget(node)
        self.loss_policy.on_loss(node, error)

    def _on_break(self) -> None:
        """A rank can compute no more, though its node is here."""
        self.loss_policy.on_break()

    async def _prepare(self, plan: Plan, settings: Settings) -> dict[int, Prepared]:
        """Assign every rank; what each holds under the plan, once its links to the others are connected."""
        facts = [member.facts for member in self.state.ranks]
        places = tuple(RankAddress(fact.node, fact.host, fact.port, fact.lends) for fact in facts)
        self.members.places.begin(self.state.epoch, places)
        folder = self.weights.folder
        prepared: dict[int, Prepared] = {}

        async def assign(node: str, channel: Channel, rank: int) -> None:
            assignment = Assign(
                cluster=self.state.cluster,
                epoch=self.state.epoch,
                rank=rank,
                plan=plan,
                places=(),
                config=self.work.config,
                settings=settings,
                folder=str(folder.path) if folder else "",
                files=folder.files if folder else (),
                hub=self.work.hub.repository if self.work.hub else None,
                adapters=self.weights.adapters.files(),
            )
            await self.members.places.tell(channel)
            prepared[rank] = await channel.ask(assignment, self.work.prepare_seconds)
            self.members.record(RankPrepared(node, prepared[rank]))

        await self.members.each(assign)
        return prepared

    async def _load(self, on_progress: OnProgress | None) -> None:
        async def load(node: str, channel: Channel, rank: int) -> None:
            async with aclosing(channel.stream(Load(self.state.epoch), self.work.load_seconds)) as answers:
                async for message in answers:
                    if isinstance(message, Progress):
                        self.members.record(RankLoading(node, message))
                        if on_progress is not None:
                            on_progress(f"rank {rank} on {node}", message.done, message.total)
                    elif isinstance(message, Loaded):
                        self.members.record(RankLoaded(node, message))

        await self.members.each(load)

    async def _start(self, node: str, channel: Channel, rank: int) -> None:
        await channel.ask(Start(self.state.epoch), START_SECONDS)
        self.members.record(RankReady(node))


def _model_folder(work: Workload) -> ModelFolder | None:
    """What this process can give of the model's weights."""
    if work.folder is None or work.hub is None:
        return None if work.folder is None else ModelFolder(work.folder)
    cache = ChunkCache(Path(work.hub.cache) if work.hub.cache else None, work.hub.cache_bytes)
    return HubFolder(work.folder, HubChunks(work.hub.repository, cache))
