"""`Replica`: a Raft replica of the coordinator's state on a socket and on a clock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping

from tllm.cluster.certificates import Identity
from tllm.cluster.channel import Act, Channel
from tllm.cluster.connection import Address, accept_tls, connect_tls, listen, reason_of, serve_connections
from tllm.cluster.consensus.consensus_links import CONNECT_SECONDS, SILENT_SECONDS, ConsensusLinks
from tllm.cluster.consensus.raft import Raft
from tllm.cluster.consensus.raft_messages import (
    CONSENSUS_BYTES,
    ENTRY_BYTES,
    Appended,
    AppendEntries,
    CoordinatorFound,
    FindCoordinator,
    FromReplica,
    InstallSnapshot,
    RaftMessage,
    RequestVote,
    TimeoutNow,
    ToReplica,
    Vote,
)
from tllm.cluster.consensus.replicated_state import AnyEntry, ReplicatedMachine, ReplicatedState, encoded
from tllm.cluster.consensus.timing import RaftTiming, boot_clock
from tllm.cluster.messages import ReplicaPlace
from tllm.cluster.tls import data_server, member_client
from tllm.core.errors import ClusterError, TllmError
from tllm.core.tasks import end_tasks

log = logging.getLogger("tllm.cluster")

TICKS = 4
"""Ticks in a heartbeat."""

COMMIT_SECONDS = 10.0
"""A proposal that is not committed by then has failed. A leader that reaches no majority has stepped down before."""


class Deposed(ClusterError):
    """This process does not lead the replicas of the cluster's state any more: another may coordinate already, at the
    address of its `successor` where that was found, once it `was_sought`."""

    successor: Address | None = None
    was_sought: bool = False


class Replica:
    """Listens from when it is made; `run` takes part until it is cancelled. It belongs to one event loop.

    `host` is where the others reach it, and `listen_on` the address of this machine that it takes connections on. One
    that `founds` a group begins as its only voter and leads at once; any other waits until a leader writes to it.
    """

    def __init__(
        self,
        identity: Identity,
        host: str,
        listen_on: Address,
        founds: bool = False,
        timing: RaftTiming | None = None,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self.changed = asyncio.Condition()
        self.timing, self._clock = timing or RaftTiming(), clock
        self._socket = listen(*listen_on)
        self._context = data_server(identity)
        self._links = ConsensusLinks(identity)
        self._machine = ReplicatedMachine()
        self.place = ReplicaPlace(f"{identity.name}/{secrets.token_hex(8)}", host, int(self._socket.getsockname()[1]))
        voters = (self.place,) if founds else ()
        self.raft = Raft(self.place, voters, self.timing, random.Random(), self._links.post, self._machine)
        self.raft.tick(self._clock())

    @property
    def state(self) -> ReplicatedState:
        """As far as this replica knows it; the truth while it `leads`."""
        return self._machine.state

    @property
    def leads(self) -> bool:
        """Whether this replica leads, and no other can."""
        return self.raft.is_leased(self._clock())

    @property
    def term(self) -> int:
        return self.raft.ballot.term

    def now(self) -> float:
        """By the clock that its Raft counts by."""
        return self._clock()

    async def run(self) -> None:
        """Take part until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(serve_connections(self._socket, self._serve))
                tasks.create_task(self._tick())
        finally:
            await self._links.close()

    def close(self) -> None:
        """Stop listening, where `run` has not begun or has ended."""
        self._socket.close()

    async def propose(self, entry: AnyEntry) -> None:
        """Agree on an entry: when this returns, every later leader has it.

        Deposed where this replica does not lead, or leads no more before a majority has the entry: then nobody knows
        whether it counts. ClusterError for an entry that is too long.
        """
        content = encoded(entry)
        if len(content) > ENTRY_BYTES:
            raise ClusterError(
                f"a {type(entry).__name__} of {len(content)} bytes is too long to be replicated: {ENTRY_BYTES}"
            )
        await self._committed(self.raft.propose(content, self._clock()), type(entry).__name__)

    async def change(self, voters: tuple[ReplicaPlace, ...]) -> None:
        """Agree on other voters, one more or one less. Deposed as in `propose`."""
        await self._committed(self.raft.change(voters, self._clock()), "a change of replicas")

    async def hand_over(self, seconds: float) -> bool:
        """Let another replica lead, and vote on until it does, for so long at most; whether this one leads no more."""
        term, heirs = self.term, list[ReplicaPlace]()

        def handed() -> bool:
            if not heirs and (heir := self.raft.hand_over(self._clock())) is not None:
                heirs.append(heir)
            return bool(heirs) or self._has_left(term)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.until(handed)
                # The new leader's first entry: with less it may still need this replica's vote.
                await self.until(lambda: self.raft.log.term(self.raft.log.commit) > term)
        return self._has_left(term)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, which is looked at again after each message and each tick."""
        async with self.changed:
            await self.changed.wait_for(holds)

    async def _committed(self, proposed: tuple[int, int] | None, what: str) -> None:
        if proposed is None:
            raise Deposed(f"{what} cannot be agreed on: this process does not lead, or too much is not agreed on yet")
        term, index = proposed
        raft = self.raft
        await self._notify()
        try:
            async with asyncio.timeout(COMMIT_SECONDS):
                await self.until(lambda: self._has_left(term) or raft.log.commit >= index)
        except TimeoutError as error:
            raise Deposed(f"no majority of the replicas agreed on {what} within {COMMIT_SECONDS:g} s") from error
        if self._has_left(term):
            raise Deposed(f"another replica may lead now, before a majority agreed on {what}")

    def _has_left(self, term: int) -> bool:
        return self.raft.leadership is None or self.raft.ballot.term != term

    async def _tick(self) -> None:
        while True:
            self.raft.tick(self._clock())
            await self._notify()
            await asyncio.sleep(self.timing.heartbeat / TICKS)

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        """Take messages of one connection. Only who has a certificate of the cluster gets so far."""
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = await accept_tls(sock, self._context, peer, ToReplica, CONSENSUS_BYTES)
        except OSError as error:
            sock.close()
            log.warning("%s was refused: %s", peer, reason_of(error))
            return
        name = channel.peer_name()
        assert name is not None, "the context demands a certificate"
        channel.peer = name
        silence = Silence(channel)
        try:
            await channel.run(self._acts(name))
        except TllmError as error:
            log.warning("a connection of %s to this replica ended: %s", name, error.message)
        finally:
            silence.cancel()
            channel.abort()

    def _acts(self, name: str) -> Mapping[type, Act]:
        async def take(message: RaftMessage) -> None:
            if message.sender.node != name:
                raise ClusterError(f"{name} speaks for {message.sender.id}")
            self.raft.step(message, self._clock())
            await self._notify()

        async def find(_: FindCoordinator) -> CoordinatorFound:
            state, replicas = self.state, self.raft.log.configuration
            knows = self.leads and state.coordinator is not None and state.term == self.term
            host, port = state.coordinator if knows and state.coordinator else ("", 0)
            return CoordinatorFound(self.term, host, port, replicas)

        messages = (RequestVote, TimeoutNow, Vote, AppendEntries, InstallSnapshot, Appended)
        return {FindCoordinator: find, **dict.fromkeys(messages, take)}

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


class Silence:
    """Ends a channel on which nothing has come for SILENT_SECONDS: no byte, as a long message may take longer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._timer: asyncio.Handle = asyncio.get_running_loop().call_soon(self._watch)

    def cancel(self) -> None:
        self._timer.cancel()

    def _watch(self) -> None:
        left = self._channel.heard + SILENT_SECONDS - time.monotonic()
        if left <= 0:
            self._channel.abort()
        else:
            self._timer = asyncio.get_running_loop().call_later(left, self._watch)


async def ask_replicas(places: Iterable[ReplicaPlace], identity: Identity) -> tuple[CoordinatorFound | None, int]:
    """What the first of these replicas says that knows where the coordinator listens, and how many answer without
    knowing. If none knows, those are asked too that they name. Those that cannot be reached are passed over."""
    known = tuple(places)
    answers = await answers_of(known, identity)
    if not any(answer.address for answer in answers):
        named = dict.fromkeys(place for answer in answers for place in answer.replicas if place not in known)
        answers += await answers_of(named, identity)
    found = next((answer for answer in answers if answer.address), None)
    return found, sum(not answer.address for answer in answers)


async def answers_of(places: Iterable[ReplicaPlace], identity: Identity) -> list[CoordinatorFound]:
    """What those of these replicas say of the coordinator that can be reached."""
    asked = (find_coordinator(place, identity) for place in places)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, TllmError):
            raise answer
    return [answer for answer in answers if isinstance(answer, CoordinatorFound)]


async def find_coordinator(place: ReplicaPlace, identity: Identity) -> CoordinatorFound:
    """What a replica says: it names the coordinator only where it leads and knows of one.

    ClusterError where it cannot be reached.
    """
    context = member_client(identity)
    channel = await connect_tls(place.address, context, place.node, FromReplica, CONSENSUS_BYTES, CONNECT_SECONDS)
    reading = asyncio.create_task(channel.run({}))
    try:
        found: CoordinatorFound = await channel.ask(FindCoordinator(), CONNECT_SECONDS)
        return found
    finally:
        channel.abort()
        await end_tasks(reading)
