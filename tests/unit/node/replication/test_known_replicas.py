"""How a first machine that starts again finds who coordinates, and tells it to those that ask at its old address."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.faults.full_disk import no_room
from tllm.cluster.certificates import COORDINATOR, Authority
from tllm.cluster.connection import Address
from tllm.cluster.consensus import replica as replica_module
from tllm.cluster.consensus.replica import Deposed, Replica
from tllm.cluster.consensus.replicated_state import CoordinatorBegan
from tllm.cluster.join import join, locate
from tllm.cluster.join_token import JoinToken, TokenBook
from tllm.cluster.messages import ReplicaPlace
from tllm.core.errors import AuthError, ClusterError, ConfigError
from tllm.core.tasks import end_tasks
from tllm.node.replication import known_replicas as known_replicas_module
from tllm.node.replication.coordinator_redirect import CoordinatorRedirect
from tllm.node.replication.first_replica import given_up_for_before
from tllm.node.replication.known_replicas import REPLICAS_FILE, KnownReplicas

GONE = ReplicaPlace("gone/" + "0" * 16, "127.0.0.1", 9)
HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create()


@pytest.fixture(autouse=True)
def _answers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is: a replica that answers late is taken for one that is gone."""
    monkeypatch.setattr(replica_module, "CONNECT_SECONDS", 20.0)


@contextlib.asynccontextmanager
async def leading(authority: Authority) -> AsyncIterator[Replica]:
    replica = Replica(authority.identity(COORDINATOR), HERE, (HERE, 0), founds=True)
    running = asyncio.create_task(replica.run())
    try:
        yield replica
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_the_coordinator_is_found_by_any_replica_that_is_left(tmp_path: Path, authority: Authority) -> None:
    async def scene() -> None:
        async with leading(authority) as replica:
            KnownReplicas(tmp_path, authority).keep((GONE, replica.place))
            known = KnownReplicas(tmp_path, authority)
            with pytest.raises(ClusterError, match="answer, and none has led"):
                await known.coordinator(0.1)
            await replica.propose(CoordinatorBegan(replica.term, HERE, 4711))
            assert await known.coordinator() == (HERE, 4711)
        assert await known.coordinator() is None, "nobody is left, so a new cluster may begin"

    asyncio.run(scene())


def test_a_cluster_that_forms_is_given_up_once_the_one_before_is_reached(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the first machine was started again while its network was away."""
    monkeypatch.setattr(known_replicas_module, "AGAIN_SECONDS", 0.05)

    async def scene() -> None:
        async with leading(authority) as replica:
            known = KnownReplicas(tmp_path, authority)
            known.keep((GONE, replica.place))

            let_go = list[bool]()

            async def form(is_forming: bool) -> None:
                async with given_up_for_before(known, lambda: is_forming, lambda: let_go.append(is_forming)):
                    await asyncio.sleep(0.1)
                    await replica.propose(CoordinatorBegan(replica.term, HERE, 4711))
                    await asyncio.sleep(60.0 if is_forming else 0.5)  # the first until it is given up

            await form(is_forming=False)
            with pytest.raises(Deposed) as raised:
                await form(is_forming=True)
            assert raised.value.successor == (HERE, 4711)
            assert let_go == [True], "nodes that came are not told to end, and only where the cluster is given up"

    asyncio.run(scene())


def test_another_clusters_replicas_are_not_asked_for_the_way(tmp_path: Path, authority: Authority) -> None:
    async def scene() -> None:
        async with leading(Authority.create()) as replica:
            known = KnownReplicas(tmp_path, authority)
            known.keep((GONE, replica.place))
            assert await known.coordinator() is None

    asyncio.run(scene())


def test_one_replica_alone_is_not_kept(tmp_path: Path, authority: Authority) -> None:
    known = KnownReplicas(tmp_path, authority)
    known.keep((GONE,))
    assert not (tmp_path / REPLICAS_FILE).exists()


def test_others_that_were_left_out_are_forgotten(tmp_path: Path, authority: Authority) -> None:
    """Of three machines one is lost, so one of two replicas is left out: it answers, leads nobody, and a first machine
    that started again would wait for it and end. What the cluster before knew stays until this one has others."""

    own, before = ReplicaPlace("coordinator/" + "1" * 16, HERE, 9), (GONE, ReplicaPlace("b/" + "0" * 16, HERE, 10))

    class Leading:
        place, raft = own, SimpleNamespace(log=SimpleNamespace(configuration=(own,)))

        async def until(self, holds: Callable[[], bool]) -> None:
            while not holds():
                await asyncio.sleep(0)

    async def scene() -> None:
        leading = Leading()
        KnownReplicas(tmp_path, authority).keep(before)
        known = KnownReplicas(tmp_path, authority)
        following = asyncio.create_task(known.follow(leading))  # type: ignore[arg-type]
        for configuration, kept in (((own,), before), ((own, GONE), (own, GONE)), ((own,), ())):
            leading.raft.log.configuration = configuration
            for _ in range(10):
                await asyncio.sleep(0)
            assert known._last == kept == KnownReplicas(tmp_path, authority)._last
        await end_tasks(following)

    asyncio.run(scene())


def test_a_full_disk_ends_nothing_and_is_written_to_once_it_takes_more(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_replicas_module, "AGAIN_SECONDS", 0.05)

    class Unchanged:
        raft = SimpleNamespace(log=SimpleNamespace(configuration=(GONE, GONE)))

        async def until(self, holds: Callable[[], bool]) -> None:
            await asyncio.Event().wait()

    async def scene() -> None:
        known = KnownReplicas(tmp_path, authority)
        following = asyncio.create_task(known.follow(Unchanged()))  # type: ignore[arg-type]
        with no_room():
            while not caplog.messages:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # in which it is not said again
        assert not (tmp_path / REPLICAS_FILE).exists() and not following.done()
        while not (tmp_path / REPLICAS_FILE).exists():
            await asyncio.sleep(0.01)
        following.cancel()

    asyncio.run(scene())
    assert [message.partition("replicas.json")[2] for message in caplog.messages] == [
        ", without which this machine would not find its cluster if it started again, cannot be written: "
        "File too large",
        ", without which this machine would not find its cluster if it started again, can be written again",
    ]


@pytest.mark.parametrize(
    "content",
    [b'[["no place", "", -1]]', b"\xff", b'[["\xff"]]', b"[" * 100_000, None],
    ids=["another form", "no JSON", "no UTF-8", "too deep", "a folder"],
)
def test_a_file_that_cannot_be_read_is_named(content: bytes | None, tmp_path: Path, authority: Authority) -> None:
    path = tmp_path / REPLICAS_FILE
    if content is None:
        path.mkdir()  # which no bytes can be read of
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=REPLICAS_FILE):
        KnownReplicas(tmp_path, authority)


def test_a_guest_is_told_where_the_coordinator_is_and_nothing_else(authority: Authority) -> None:
    places: list[Address | None] = [(HERE, 4711), None]

    async def find() -> Address | None:
        return places.pop(0)

    async def scene() -> None:
        door = CoordinatorRedirect((HERE, 0), authority, find)
        running = asyncio.create_task(door.run())
        assert await locate(door.address) == (HERE, 4711)
        with pytest.raises(ClusterError, match="not to be found at the moment"):
            await locate(door.address)
        places.append((HERE, 4711))
        with pytest.raises(ClusterError, match="not to be found at the moment"):
            await join(door.address, JoinToken.of_authority(authority), "node-1")  # a Join gets no certificate here
        running.cancel()

    asyncio.run(scene())


def test_who_has_the_authoritys_key_has_a_token_and_nobody_else(authority: Authority) -> None:
    book = TokenBook(authority.fingerprint)
    book.keep(JoinToken.of_authority(authority), now=0.0)
    again = Authority.restore(authority.pem, authority.key_pem)
    book.redeem(JoinToken.of_authority(again).secret, now=1.0)
    with pytest.raises(AuthError):
        book.redeem(JoinToken.of_authority(Authority.create()).secret, now=1.0)
