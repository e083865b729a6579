"""Replicas of the coordinator's state over real sockets and TLS: what they agree on, and whom they do not listen to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace

import pytest

from tests.support.steady_loop import play_steadily
from tllm.cluster import channel as channel_module
from tllm.cluster.certificates import COORDINATOR, Authority, Identity, make_request
from tllm.cluster.channel import one_way
from tllm.cluster.connection import connect_tls
from tllm.cluster.consensus import replica as replica_module
from tllm.cluster.consensus.raft_messages import CONSENSUS_BYTES, FromReplica, RequestVote
from tllm.cluster.consensus.replica import Deposed, Replica, ask_replicas, find_coordinator
from tllm.cluster.consensus.replicated_state import (
    ClusterFounded,
    CoordinatorBegan,
    EpochBegan,
    MembersChanged,
    SigningKey,
)
from tllm.cluster.consensus.timing import RaftTiming
from tllm.cluster.messages import ReplicaPlace
from tllm.cluster.tls import member_client
from tllm.core.errors import AuthError, ClusterError
from tllm.node.replication.find_successor import find_successor
from tllm.spec.plan import Plan

TIMING = RaftTiming(heartbeat=0.1, election=1.0)
HERE = "127.0.0.1"


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(50):
            await scene()

    play_steadily(limited())


def identity(authority: Authority, name: str) -> Identity:
    key, request = make_request(name)
    return Identity(name, authority.sign(request, name), key, authority.pem)


class Group:
    """Replicas of one cluster, of which the first founds the group and takes the others in."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self.replicas: list[Replica] = []
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, founds: bool = False) -> Replica:
        clock = asyncio.get_running_loop().time  # so that no leader is deposed because this process was not let run
        replica = Replica(identity(self.authority, name), HERE, (HERE, 0), founds, TIMING, clock)
        self.replicas.append(replica)
        self.tasks.append(asyncio.create_task(replica.run()))
        return replica

    async def take_in(self, replica: Replica) -> None:
        leader = self.leader()
        leader.raft.learn(replica.place, leader.now())
        await leader.until(lambda: leader.raft.has_learned(replica.place.id))
        await leader.change((*leader.raft.log.configuration, replica.place))

    def leader(self) -> Replica:
        (found,) = [replica for replica in self.replicas if replica.leads]
        return found

    async def end(self, replica: Replica) -> None:
        """As if its process had ended."""
        place = self.replicas.index(replica)
        self.replicas.pop(place)
        task = self.tasks.pop(place)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        replica.close()


@contextlib.asynccontextmanager
async def three() -> AsyncIterator[Group]:
    group = Group(Authority.create())
    group.start(COORDINATOR, founds=True)
    try:
        for name in ("north", "south"):
            await group.take_in(group.start(name))
        yield group
    finally:
        for replica in list(group.replicas):
            await group.end(replica)


async def elected(group: Group) -> Replica:
    """The replica that leads after the one before has ended."""
    while not any(replica.leads for replica in group.replicas):
        await asyncio.sleep(0.02)
    return group.leader()


def test_what_one_coordinator_said_the_next_one_knows() -> None:
    async def scene() -> None:
        async with three() as group:
            first = group.leader()
            key = SigningKey(group.authority.pem, group.authority.key_pem)
            plan = Plan.parse("pp=2", 4)
            await first.propose(ClusterFounded("c", key))
            await first.propose(CoordinatorBegan(first.term, HERE, 7000))
            await first.propose(EpochBegan(1, plan, ("north", "south")))
            asker = identity(group.authority, "a")
            said = [await find_coordinator(one.place, asker) for one in group.replicas]
            assert {one.address for one in said} == {(HERE, 7000), None}, "only who leads knows"
            north = group.replicas[1].place
            named, others = await ask_replicas([north], asker)
            assert named is not None and named.address == (HERE, 7000) and others == 2, "others are asked that it names"
            await group.end(first)
            second = await elected(group)
            assert second.term > first.term
            state = second.state
            assert (state.cluster, state.epoch, state.ranks) == ("c", 1, ("north", "south"))
            assert state.authority is not None
            restored = Authority.restore(state.authority.certificate, state.authority.key)
            assert restored.fingerprint == group.authority.fingerprint
            assert await ask_replicas([second.place], identity(restored, "b")) == (None, 2), (
                "it does not coordinate yet"
            )
            await second.propose(CoordinatorBegan(second.term, HERE, 7001))
            assert (await find_coordinator(second.place, identity(restored, "b"))).address == (HERE, 7001)
            await second.propose(EpochBegan(2, plan, ("north", "south")))

    play(scene)


def test_a_leader_that_reaches_nobody_is_deposed_and_agrees_on_nothing() -> None:
    async def scene() -> None:
        async with three() as group:
            first, others = group.leader(), group.replicas[1:]
            for other in others:
                await group.end(other)
            with pytest.raises(Deposed, match="before a majority agreed on EpochBegan"):
                await first.propose(EpochBegan(1, Plan.parse("pp=2", 4), ("a", "b")))
            assert first.state.epoch == 0
            with pytest.raises(Deposed, match="does not lead"):
                await first.propose(MembersChanged(("a",)))

    play(scene)


def test_one_that_was_deposed_finds_who_coordinates_and_leads_no_more() -> None:
    """Though it votes on, as of these three one has ended: it gives up its vote once it is not counted any more."""

    async def scene() -> None:
        async with three() as group:
            first, (north, south) = group.leader(), group.replicas[1:]
            await group.end(south)
            assert await first.hand_over(20.0)
            asker = identity(group.authority, COORDINATOR)
            assert await find_successor(first, asker, 0.0) is None, "nobody coordinates yet"
            searching = asyncio.create_task(find_successor(first, asker, 30.0))
            for _ in range(2):  # elected again, its process has no nodes to coordinate
                await north.until(lambda: north.leads)
                assert await north.hand_over(20.0)
            await north.until(lambda: north.leads)
            await north.propose(CoordinatorBegan(north.term, HERE, 7001))
            await asyncio.sleep(0.6)
            assert not searching.done(), "its vote is needed"
            for voters in ((first.place, north.place), (north.place,)):
                await north.change(voters)
            assert await searching == (HERE, 7001) and not first.leads

    play(scene)


def test_only_who_is_of_the_cluster_and_speaks_for_itself_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with three() as group:
            leader = group.leader()
            term = leader.term
            stranger = identity(Authority.create(), "north")
            with pytest.raises((AuthError, ClusterError)):
                await find_coordinator(leader.place, stranger)
            liar = identity(group.authority, "liar")
            channel = await connect_tls(
                leader.place.address, member_client(liar), COORDINATOR, FromReplica, CONSENSUS_BYTES, 20
            )
            await channel.send(RequestVote(99, group.replicas[1].place, 99, 99, False))
            assert await channel.receive_within(20) is None
            assert (leader.leads, leader.term) == (True, term)

    play(scene)
    assert "liar speaks for north/" in caplog.text


def test_a_message_may_come_slowly_and_silence_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of some megabytes takes longer over a slow line than silence is borne."""
    monkeypatch.setattr("tllm.cluster.consensus.replica.SILENT_SECONDS", 1.0)

    async def scene() -> None:
        steady = SimpleNamespace(monotonic=asyncio.get_running_loop().time)
        for module in (channel_module, replica_module):
            monkeypatch.setattr(module, "time", steady)
        group = Group(Authority.create())
        replica = group.start("north")
        south = identity(group.authority, "south")
        channel = await connect_tls(replica.place.address, member_client(south), "north", FromReplica, 1000, 20)
        asked = one_way(RequestVote(7, ReplicaPlace("south/0123456789abcdef", HERE, 1), 99, 99, False))
        for start in range(0, len(asked), 20):
            channel._writer.write(asked[start : start + 20])
            await asyncio.sleep(0.3)
        assert len(asked) > 80 and replica.term == 7
        assert await channel.receive_within(20) is None
        await group.end(replica)

    play(scene)


def test_as_many_nodes_are_known_as_a_cluster_may_have() -> None:
    async def scene() -> None:
        group = Group(Authority.create())
        alone = group.start(COORDINATOR, founds=True)
        nodes = tuple(f"node-{number}" for number in range(20_000))
        await alone.propose(MembersChanged(nodes))
        await alone.propose(EpochBegan(1, Plan.parse("pp=2", 4), nodes))
        assert alone.state.members == alone.state.ranks == nodes
        await group.end(alone)

    play(scene)


def test_an_entry_that_is_too_long_is_refused() -> None:
    async def scene() -> None:
        group = Group(Authority.create())
        alone = group.start(COORDINATOR, founds=True)
        with pytest.raises(ClusterError, match=r"a MembersChanged of \d+ bytes is too long to be replicated: 4194304"):
            await alone.propose(MembersChanged(tuple("x" * 250 + str(number) for number in range(20_000))))
        await group.end(alone)

    play(scene)


def test_a_place_names_its_node() -> None:
    assert ReplicaPlace("lab-4/0123456789abcdef", "h", 1).node == "lab-4"
