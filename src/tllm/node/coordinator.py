"""`Coordinator`: keeps the cluster's state, gives every node its part, and serves requests through rank 0."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tllm.cluster.channel import Act, Channel
from tllm.cluster.door import Door
from tllm.cluster.identity import Authority
from tllm.cluster.messages import (
    Assign,
    Bytes,
    EngineSettings,
    Load,
    Loaded,
    Message,
    Outputs,
    Place,
    Prepared,
    Progress,
    ReadBytes,
    Start,
)
from tllm.cluster.state import ClusterState, Planned, RankLoaded, RankLoading, RankPrepared, RankReady
from tllm.cluster.tokens import HOUR, JoinToken, TokenBook
from tllm.cluster.wire import Address
from tllm.ground.errors import ClusterError, LinkError, TllmError
from tllm.node.folder import ModelFolder
from tllm.node.members import Members
from tllm.node.report import engine_stats, report
from tllm.node.requests import Requests
from tllm.server.router import Health
from tllm.spec.model import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.request import Output, Request
from tllm.weights.cover import Held, check_coverage

log = logging.getLogger("tllm.node")

PREPARE_SECONDS = 60.0
LOAD_SECONDS = 120.0  # without any progress
START_SECONDS = 30.0
BLAME_SECONDS = 0.3
"""How long to wait for more after a first loss: the links of a dead node's neighbours may fail before it is missed."""

Tell = Callable[[str, int, int], None]
"""tell(what, done, in all)"""


@dataclass(frozen=True)
class Job:
    """What the cluster is to run: `config` is the text of the model's config.json, which `spec` was read from."""

    folder: Path
    config: str
    spec: ModelSpec
    plan: Plan
    settings: EngineSettings


class Coordinator:
    """An engine for the server whose ranks live on nodes. `run` must be running from before `form` until the end.

    `first` names nodes that take the first ranks, in that order; the others follow in the order in which they joined.
    """

    def __init__(self, job: Job, authority: Authority, address: Address, first: Sequence[str] = ()) -> None:
        self.job = job
        self.fault: TllmError | None = None
        self._first = tuple(first)
        self._folder = ModelFolder(job.folder)
        self._tokens = TokenBook(authority.fingerprint)
        self._losses: list[tuple[str, TllmError]] = []
        self.members = Members(authority.cluster, self._acts, self._on_loss)
        self.requests = Requests(self._send)
        self.door = Door(authority, self._tokens, self.members.admit, self.members.is_here, address)

    # --- the engine, as the server sees it

    @property
    def model_name(self) -> str:
        return self.job.folder.resolve().name

    @property
    def max_model_len(self) -> int:
        return self.job.settings.max_model_len

    def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """The request's outputs; closing this cancels it."""
        return self.requests.submit(request)

    def stats(self) -> Mapping[str, float]:
        return engine_stats(self.state)

    def status(self) -> Mapping[str, Any]:
        return {**report(self.state), "model": self.model_name, "fault": self.fault.message if self.fault else ""}

    def health(self) -> Health:
        ranks, lost = self.state.ranks, self.state.lost
        since = max(self.requests.busy_since, ranks[0].stepped if ranks else 0.0)
        return Health(
            alive=self.fault is None,
            ready=self.state.is_ready,
            running=len(self.requests),
            seconds_since_step=time.monotonic() - since if len(self.requests) else 0.0,
            node=self._losses[0][0] if self._losses else lost[0].node if lost else "",
            reason=self.fault.message if self.fault else "",
        )

    # --- the cluster

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

    async def form(self, seconds: float | None = None, tell: Tell | None = None) -> None:
        """Wait for enough nodes, `seconds` at most, and bring every rank up. Raises what any of them fails with.

        After a loss this forms the cluster anew, from those nodes that are here then.
        """
        nodes = await self._wait_for_nodes(seconds)
        self.fault, self._losses = None, []
        self.members.tell(Planned(self.job.plan, nodes))
        held = await self._prepare()
        self._check(held)
        await self._load(tell)
        await self.members.each(self._start)
        if not self.state.is_ready:
            reasons = "; ".join(member.reason for member in self.state.lost)
            raise ClusterError(f"a node was lost while the cluster started: {reasons}")
        log.info("cluster %s is ready, epoch %d: %s", self.state.cluster, self.state.epoch, self.job.plan)

    def fail(self, error: TllmError) -> None:
        """The cluster cannot go on: every open request ends with this, and no new one is taken."""
        self.fault = error
        self.requests.fail(error)

    async def _wait_for_nodes(self, seconds: float | None) -> tuple[str, ...]:
        wanted = self.job.plan.world_size
        try:
            async with asyncio.timeout(seconds):
                await self.members.until(lambda: len(self.state.living) >= wanted)
        except TimeoutError as error:
            came = ", ".join(member.node for member in self.state.living) or "none"
            raise ClusterError(
                f"{len(self.state.living)} of {wanted} nodes joined within {seconds:g} s ({came})",
                "run the join line on the others, and see that they reach this machine",
            ) from error
        order = {node: place for place, node in enumerate(self._first)}
        nodes = sorted((member.node for member in self.state.living), key=lambda node: order.get(node, len(order)))
        return tuple(nodes[:wanted])

    async def _prepare(self) -> dict[int, Prepared]:
        facts = [member.facts for member in self.state.ranks]
        places = tuple(Place(fact.node, fact.host, fact.port) for fact in facts)
        prepared: dict[int, Prepared] = {}

        async def one(node: str, channel: Channel, rank: int) -> None:
            assign = Assign(
                cluster=self.state.cluster,
                epoch=self.state.epoch,
                rank=rank,
                plan=self.job.plan,
                places=places,
                config=self.job.config,
                settings=self.job.settings,
                folder=str(self._folder.path),
                files=self._folder.files,
            )
            prepared[rank] = await channel.ask(assign, PREPARE_SECONDS)
            self.members.tell(RankPrepared(node, prepared[rank]))

        await self.members.each(one)
        return prepared

    def _check(self, prepared: Mapping[int, Prepared]) -> None:
        """Each element that the model needs is held exactly once, or as often as the plan means it to be."""
        held = {
            rank: [Held(piece.name, piece.source, piece.replicated) for piece in one.pieces]
            for rank, one in prepared.items()
        }
        check_coverage(held, prepared[0].needed)

    async def _load(self, tell: Tell | None) -> None:
        async def one(node: str, channel: Channel, rank: int) -> None:
            async for news in channel.stream(Load(self.state.epoch), LOAD_SECONDS):
                if isinstance(news, Progress):
                    self.members.tell(RankLoading(node, news))
                    if tell is not None:
                        tell(f"rank {rank} on {node}", news.done, news.total)
                elif isinstance(news, Loaded):
                    self.members.tell(RankLoaded(node, news))

        await self.members.each(one)

    async def _start(self, node: str, channel: Channel, rank: int) -> None:
        await channel.ask(Start(self.state.epoch), START_SECONDS)
        self.members.tell(RankReady(node))

    # --- what comes from nodes

    def _acts(self, node: str) -> Mapping[type, Act]:
        async def outputs(message: Outputs) -> None:
            if self.state.ranks and self.state.ranks[0].node == node:
                self.requests.deliver(message.outputs)

        async def read(message: ReadBytes) -> Bytes:
            return await asyncio.to_thread(self._folder.read, message)

        return {Outputs: outputs, ReadBytes: read}

    def _on_loss(self, node: str, error: TllmError) -> None:
        member = self.state.member(node)
        if member is None or member.rank is None:
            return
        self._losses.append((node, error))
        if len(self._losses) == 1:
            asyncio.get_running_loop().call_later(BLAME_SECONDS, self._conclude)

    def _conclude(self) -> None:
        """Name the node that failed first by itself, not one whose link to it then broke."""
        if self._losses and self.fault is None:
            own = [loss for loss in self._losses if not isinstance(loss[1], LinkError)]
            self._losses = [*own, *(loss for loss in self._losses if loss not in own)]
            self.fail(self._losses[0][1])

    def _send(self, message: Message) -> None:
        if self.fault is not None:
            raise type(self.fault)(self.fault.message, self.fault.hint)
        driver = self.state.ranks[0].node if self.state.is_ready else ""
        if driver not in self.members.channels:
            raise ClusterError("the cluster is not ready", "wait until every node has loaded its part")
        self.members.channels[driver].post(message)
