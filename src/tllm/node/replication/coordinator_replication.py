"""`CoordinatorReplication`: keeps copies of the coordinator's state on other nodes, and ends this coordinator when
another one has taken its place."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from tllm.cluster.certificates import COORDINATOR, Authority
from tllm.cluster.channel import Channel
from tllm.cluster.connection import Address
from tllm.cluster.consensus.replica import Deposed, Replica
from tllm.cluster.consensus.replicated_state import (
    AnyEntry,
    ClusterEnded,
    ClusterFounded,
    CoordinatorBegan,
    EpochBegan,
    MembersChanged,
    SigningKey,
    TokensChanged,
    WorkChosen,
)
from tllm.cluster.messages import ReplicaPlace, Replicas, ReplicaServes, ServeReplica
from tllm.cluster.state import Member
from tllm.core.errors import ClusterError, TllmError
from tllm.core.tasks import end_tasks
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.coordinator.workload import Workload
from tllm.node.recovery.recovery import Policy
from tllm.node.replication.find_successor import HAND_OVER_SECONDS, find_successor
from tllm.node.replication.replicated_replies import ReplicatedReplies
from tllm.node.replication.replicated_work import replicated_work
from tllm.server.stored.stored_streams import StoredStreams
from tllm.spec.plan import Plan

log = logging.getLogger("tllm.node")

LOOK_SECONDS = 0.1
"""How often is looked at what changed. A node that is lost must soon be no voter, or the loss of another ends all."""

SERVE_SECONDS = 5.0
"""How long a node may take to begin a replica, and the replica to get all entries."""

AGAIN_SECONDS = 30.0
"""A node that did not become a replica is asked again after so long, and after twice as long each further time."""

MOST_SECONDS = 600.0

END_SECONDS = 1.0

HEIR_SECONDS = 10.0
"""How long a coordinator that is told to leave waits for another node to have the state."""


class NoReplica(NamedTuple):
    """Why a node did not become a replica, and for how many seconds, until when, it is not asked again."""

    why: str
    seconds: float
    until: float


class CoordinatorReplication:
    """The coordinator's `Replication`. Its process holds the replica that leads; `run` begins when that leads.

    There are to be `wanted` replicas, or as many as there are nodes that can succeed, and always an odd number: of two,
    each would be needed. `host` is where nodes reach the coordinator.
    """

    def __init__(
        self,
        replica: Replica,
        coordinator: Coordinator,
        authority: Authority,
        host: str,
        policy: Policy,
        wanted: int,
    ) -> None:
        self._replica, self._coordinator, self._authority = replica, coordinator, authority
        self._address: Address = (host, coordinator.control_server.port)
        self._policy: Policy = policy
        self._wanted = wanted
        self._term = replica.term
        self._agreed_work: Workload | None = None
        self._phase: Literal["begins", "founded", "hands over", "over"] = "begins"
        self._failed: dict[str, NoReplica] = {}
        self._told: dict[str, tuple[Channel, tuple[ReplicaPlace, ...]]] = {}  # which channel of a node was told what
        self._replies = ReplicatedReplies(self.propose)

    async def run(self) -> None:
        """Tell the replicas what changes, and see that there are enough. Deposed once this one does not lead."""
        keeping = asyncio.create_task(self._keep(), name="replication")
        replying = asyncio.create_task(self._replies.run(), name="replicated replies")
        leaving = asyncio.create_task(self._replica.until(lambda: not self._leads), name="lead")
        try:
            await asyncio.wait((keeping, replying, leaving), return_when=asyncio.FIRST_COMPLETED)
            for task in (keeping, replying):
                if task.done() and not isinstance(task.exception(), Deposed):
                    await task
            if self._phase in ("hands over", "over"):  # whoever has begun that does the rest
                return
            raise Deposed(
                f"this process coordinates no more: it could not reach most of {self._count()} replicas of its state",
                "another of them takes over: ask another machine (`tllm status` there)",
            )
        finally:
            await end_tasks(keeping, replying, leaving)

    async def begin_epoch(self, epoch: int, plan: Plan, nodes: Sequence[str]) -> None:
        """Agree on an epoch, and on the work if that has changed."""
        await self._replica.until(lambda: self._phase != "begins" or not self._leads)
        await self._propose_work()
        await self.propose(EpochBegan(epoch, plan, tuple(nodes)))

    def keep_replies(self, streams: StoredStreams) -> None:
        self._replies.keep(streams, self._replica.state.replies)

    async def propose(self, entry: AnyEntry) -> None:
        """Agree on any entry. Deposed where another coordinates, or may, and where this process was elected anew since:
        it has let go of its nodes."""
        if not self._leads:
            raise Deposed(f"a {type(entry).__name__} cannot be agreed on: this process coordinates no more")
        await self._replica.propose(entry)

    async def hand_over(self, leaving: Sequence[str]) -> bool:
        """Wait until another process has the state, agree that nobody waits for `leaving` nodes, and let it lead."""
        if not await self._wait(lambda: self._phase == "founded" and self._has_heir(), HEIR_SECONDS):
            if self._leads:
                log.error("no other node could take the coordinator's place within %g s", HEIR_SECONDS)
            return not self._leads
        self._coordinator.control_server.own.update(leaving)
        self._phase = "hands over"
        with contextlib.suppress(Deposed):
            await self._keep_known()
        handed = await self._replica.hand_over(HAND_OVER_SECONDS)
        if handed:
            log.info(
                "hands the coordinator's office over to %s", self._replica.raft.leader.partition("/")[0] or "another"
            )
        else:
            self._phase = "founded"
        return handed

    async def find_successor(self, seconds: float) -> Address | None:
        return await find_successor(self._replica, self._authority.identity(COORDINATOR), seconds)

    async def end(self) -> None:
        """The cluster ends on purpose: nobody is to take over."""
        self._phase = "over"
        with contextlib.suppress(TllmError, TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self.propose(ClusterEnded())

    def status(self) -> Mapping[str, Any]:
        away = self._away()
        return {
            "term": self._term,
            "wanted": self._wanted,
            "nodes": [place.node for place in self._answering() if place not in away],
            "eligible": [member.node for member in self._eligible() if member.node not in self._failed],
        }

    @property
    def _leads(self) -> bool:
        return self._replica.raft.leadership is not None and self._replica.term == self._term

    def _has_heir(self) -> bool:
        """Whether enough of the replicas would be left without this one."""
        return 2 * (len(self._answering()) - 1) > self._count()

    def _count(self) -> int:
        return len(self._replica.raft.log.configuration)

    async def _keep(self) -> None:
        await self._found()
        while self._leads:
            await self._keep_known()
            await self._keep_replicas()
            self._tell_nodes()
            await self._wait(lambda: False, LOOK_SECONDS)

    async def _found(self) -> None:
        """Say who coordinates. The first coordinator says what cluster this is."""
        if self._replica.state.authority is None:
            key = SigningKey(self._authority.pem, self._authority.key_pem)
            await self.propose(ClusterFounded(self._authority.cluster, key))
        await self._propose_work()
        await self.propose(CoordinatorBegan(self._term, *self._address))
        self._phase = "founded"

    async def _propose_work(self) -> None:
        chosen = self._coordinator.work
        if chosen is self._agreed_work:
            return
        work = replicated_work(chosen, self._policy, self._wanted)
        if work != self._replica.state.work:
            await self.propose(WorkChosen(work))
        self._agreed_work = chosen

    async def _keep_known(self) -> None:
        """Agree on who is a member, on the join tokens, and on what the nodes run."""
        await self._propose_work()
        state = self._replica.state
        nodes = tuple(member.node for member in self._coordinator.state.living)
        own = tuple(sorted(self._coordinator.control_server.own))
        if (nodes, own) != (state.members, state.own):
            await self.propose(MembersChanged(nodes, own))
        tokens = self._coordinator.tokens.records(time.time())
        if tokens != state.tokens:
            await self.propose(TokensChanged(tokens))

    async def _keep_replicas(self) -> None:
        """Take one replica in or leave one out, where there are too few or too many, or one is silent."""
        for node in self._failed.keys() - self._coordinator.members.channels.keys():
            del self._failed[node]  # one that comes by its name is asked at once
        voters, away = self._replica.raft.log.configuration, self._away()
        eligible = self._eligible()
        held = {place.node for place in voters if place not in away}
        others = [member for member in eligible if member.node not in held and self._may_ask(member.node)]
        possible = min(self._wanted, len(held) + len(others))
        aim = possible - (possible + 1) % 2
        if away:
            await self._leave_out(away[0], "it is lost or silent")
        elif len(voters) > aim:
            last = next(place for place in reversed(voters) if place != self._replica.place)
            await self._leave_out(last, "an odd number is kept")
        elif len(voters) < aim:
            await self._take_in(others[0])

    def _answering(self) -> tuple[ReplicaPlace, ...]:
        return self._replica.raft.answering(self._replica.now())

    def _away(self) -> tuple[ReplicaPlace, ...]:
        """The replicas that are lost or silent, and still counted."""
        raft = self._replica.raft
        lost = {member.node for member in self._coordinator.state.members if not member.is_living}
        return raft.silent(self._replica.now()) + tuple(place for place in raft.log.configuration if place.node in lost)

    async def _leave_out(self, place: ReplicaPlace, why: str) -> None:
        """At the next look, where too few of those that stay have answered just now."""
        raft = self._replica.raft
        left = tuple(one for one in raft.log.configuration if one != place)
        if not raft.reaches(left, self._replica.now()):
            return
        await self._replica.change(left)
        log.info("%s holds no replica of the coordinator's state any more: %s", place.node, why)

    async def _take_in(self, member: Member) -> None:
        """Let a node hold a replica, and vote once it has every entry."""
        node, raft = member.node, self._replica.raft
        try:
            channel = self._coordinator.members.channels[node]
            answer: ReplicaServes = await channel.ask(self._asked_of(node), SERVE_SECONDS)
            if answer.place.node != node:
                raise ClusterError(f"{node} answered with a replica that is not its own")
        except TllmError as error:
            self._fail(node, error.message)
            return
        place = answer.place
        raft.learn(place, self._replica.now())
        if not await self._wait(lambda: raft.has_learned(place.id), SERVE_SECONDS):
            self._fail(node, f"its replica did not get the state within {SERVE_SECONDS:g} s")
            return
        await self._replica.change((*raft.log.configuration, place))
        self._failed.pop(node, None)
        log.info("%s holds one of %d replicas of the coordinator's state", node, self._count())

    def _asked_of(self, node: str) -> ServeReplica:
        """What a node is asked that is to hold a replica: it has the model's files, unless there are none or all get
        them from the hub. One that had a part in an epoch has said so already."""
        work, weights = self._coordinator.work, self._coordinator.weights
        asked, folder = ServeReplica(self._replica.timing.election, work.reads), weights.folder
        if work.hub is not None or folder is None or weights.catalogue.has_files(node):
            return asked
        return msgspec.structs.replace(asked, folder=str(folder.path), model=folder.files)

    def _eligible(self) -> list[Member]:
        """Living nodes that could coordinate, as far as is known, those of machines without a replica first: none is a
        process of this one."""
        coordinator = self._coordinator
        found = [
            member
            for member in coordinator.state.living
            if member.facts.can_succeed and member.node not in coordinator.control_server.own
        ]
        replicas = {place.node for place in self._replica.raft.log.configuration}
        machines = {member.facts.host_name for member in found if member.node in replicas}
        return sorted(found, key=lambda member: member.facts.host_name in machines)

    def _may_ask(self, node: str) -> bool:
        until = self._failed[node].until if node in self._failed else 0.0
        return node in self._coordinator.members.channels and time.monotonic() > until

    def _fail(self, node: str, why: str) -> None:
        before, seconds = self._failed.get(node), AGAIN_SECONDS
        if before is not None and before.why == why:
            seconds = min(2 * before.seconds, MOST_SECONDS)
        else:  # once, and not each time that it is asked
            log.warning("%s does not hold a replica of the coordinator's state: %s", node, why)
        self._failed[node] = NoReplica(why, seconds, time.monotonic() + seconds)

    def _tell_nodes(self) -> None:
        """Tell each node where another coordinator is to be asked for; nobody, where this one alone knows the state."""
        voters = self._replica.raft.log.configuration
        places = voters if len(voters) > 1 else ()
        channels = self._coordinator.members.channels
        told = {node: (channel, places) for node, channel in channels.items()}
        for node in told:
            if self._told.get(node) != told[node]:
                channels[node].post(Replicas(places))
        self._told = told

    async def _wait(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until something holds, for so long at most; whether it does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._replica.until(lambda: holds() or not self._leads)
        return holds()
