"""The control port over loopback: the way in, and everyone who must stay outside."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace

import msgspec
import pytest

from tests.support.steady_loop import play_steadily
from tests.unit.cluster.kits import facts
from tllm.cluster import control_server as door_module
from tllm.cluster import join as join_module
from tllm.cluster.certificates import COORDINATOR, Authority, Identity, make_request
from tllm.cluster.channel import ANSWER, HEAD, ONE_WAY, QUESTION, Channel
from tllm.cluster.connection import Address, connect_tls
from tllm.cluster.control_server import ControlServer
from tllm.cluster.join import attach, join, locate
from tllm.cluster.join_token import JoinToken, TokenBook
from tllm.cluster.messages import (
    GUEST_BYTES,
    MEMBER_BYTES,
    PROTOCOL,
    Attach,
    Attached,
    Heartbeat,
    Hello,
    Join,
    Message,
    Refused,
    ToGuest,
    ToNode,
)
from tllm.cluster.tls import guest_client, member_client, unverified_client
from tllm.cluster.weight_messages import ReadBytes
from tllm.core.errors import AuthError, ClusterError, ConfigError
from tllm.core.tasks import end_tasks
from tllm.recipes.bench.processes import free_row

HERE = "127.0.0.1"
SOON = 3.0
"""Seconds for what must happen within a second, by a clock that does not count what a busy machine takes of them."""


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest is waited for a second and not for five, which every silent one here would take."""
    monkeypatch.setattr(door_module, "GUEST_SECONDS", 1.0)


class Gate:
    """A door with nothing behind it but a list of who was let in."""

    def __init__(self) -> None:
        self.authority = Authority.create()
        self.tokens = TokenBook(self.authority.fingerprint)
        self.living, self.is_ending = set[str](), False
        self.beats: list[tuple[str, Heartbeat]] = []
        self.door = ControlServer(self.authority, self.tokens, self, (HERE, 0))
        self.address: Address = (HERE, self.door.port)

    def is_here(self, node: str) -> bool:
        return node in self.living

    async def admit(self, channel: Channel, node: str) -> None:
        frame = await channel.receive()
        assert frame is not None
        assert isinstance(frame.message, Attach)
        self.living.add(node)
        await channel.write(ANSWER, frame.number, Attached(self.authority.cluster, 0.5, 5.0))

        async def beat(message: Heartbeat) -> None:
            self.beats.append((node, message))

        try:
            await channel.run({Heartbeat: beat})
        finally:
            self.living.discard(node)

    def token(self, **more: float) -> JoinToken:
        return self.tokens.issue(time.time(), **more)  # type: ignore[arg-type]

    async def check_unharmed(self) -> None:
        """A node with a good token still gets in and is heard."""
        identity = await join(self.address, self.token(), "good")
        channel, _ = await attach(self.address, identity, facts("good"))
        await channel.send(Heartbeat(stats={"running": 7.0}))
        await until(lambda: ("good", Heartbeat(stats={"running": 7.0})) in self.beats)
        await channel.close()
        await until(lambda: "good" not in self.living)


async def until(holds: Callable[[], bool], seconds: float = SOON) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def gate() -> AsyncIterator[Gate]:
    opened = Gate()
    task = asyncio.create_task(opened.door.run())
    try:
        yield opened
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def play(scene: Callable[[Gate], Awaitable[None]]) -> None:
    """Run the scene against an open gate, and then see that the cluster is unharmed."""

    async def whole() -> None:
        async with gate() as opened:
            await scene(opened)
            await opened.check_unharmed()

    play_steadily(whole())


@contextlib.asynccontextmanager
async def raw(
    address: Address, context: ssl.SSLContext | None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    name = COORDINATOR if context else None
    reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname=name)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def closed_within_a_second(reader: asyncio.StreamReader) -> bytes:
    """What still comes before the other end closes."""
    async with asyncio.timeout(SOON):
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            return await reader.read()
    return b""


def test_a_node_joins_and_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tllm.cluster")

    async def scene(opened: Gate) -> None:
        token = opened.token()
        identity = await join(opened.address, token, "node-1")
        channel, attached = await attach(opened.address, identity, facts("node-1"))
        assert attached.cluster == opened.authority.cluster
        await channel.send(Heartbeat(stats={"waiting": 3.0}))
        await until(lambda: opened.beats == [("node-1", Heartbeat(stats={"waiting": 3.0}))])
        assert opened.living == {"node-1"}
        await channel.close()
        assert str(token) not in caplog.text

    play(scene)


def test_a_certificate_opens_the_door_more_than_once() -> None:
    async def scene(opened: Gate) -> None:
        identity = await join(opened.address, opened.token(), "node-1")
        for _ in range(3):
            channel, _ = await attach(opened.address, identity, facts("node-1"))
            await channel.close()

    play(scene)


async def wrong_token(opened: Gate) -> JoinToken:
    return TokenBook(opened.authority.fingerprint).issue(time.time())


async def expired_token(opened: Gate) -> JoinToken:
    return opened.tokens.issue(time.time() - 100, seconds=60)


async def used_token(opened: Gate) -> JoinToken:
    token = opened.token()
    await join(opened.address, token, "first")
    return token


async def token_of_another_cluster(opened: Gate) -> JoinToken:
    return TokenBook(Authority.create().fingerprint).issue(time.time())


@pytest.mark.parametrize(
    ("make", "words", "by_coordinator"),
    [
        (wrong_token, "not one of this cluster", True),
        (expired_token, r"expired [45]\d s ago", True),
        (used_token, "used up", True),
        (token_of_another_cluster, "not the one that the join token was made for", False),
    ],
)
def test_a_token_that_is_no_good(
    make: Callable[[Gate], Awaitable[JoinToken]], words: str, by_coordinator: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(opened: Gate) -> None:
        token = await make(opened)
        async with asyncio.timeout(SOON):
            with pytest.raises(AuthError, match=words):
                await join(opened.address, token, "uninvited")
        said = [record.message for record in caplog.records if re.search(words, record.message)]
        assert len(said) == by_coordinator, "the node's command tells the error, and its log would say it twice"
        assert opened.door.refused == by_coordinator

    play(scene)


def test_a_name_that_is_taken_and_a_name_that_nobody_may_have() -> None:
    async def scene(opened: Gate) -> None:
        identity = await join(opened.address, opened.token(), "node-1")
        channel, _ = await attach(opened.address, identity, facts("node-1"))
        token = opened.token()
        with pytest.raises(AuthError, match="node-1 is here already"):
            await join(opened.address, token, "node-1")
        with pytest.raises(AuthError, match="cannot be the name"):
            await join(opened.address, token, COORDINATOR)
        await join(opened.address, token, "node-2")  # what was refused used up nothing
        await channel.close()

    play(scene)


class TwoAuthorities(Authority):
    """A false one, which shows the certificate of the true one before its own."""

    true = b""

    @property
    def pem(self) -> bytes:
        return self.true + super().pem


class Thief(TokenBook):
    """Keeps the secrets that it is told."""

    stolen = b""

    def check(self, secret: bytes, now: float) -> None:
        self.stolen = secret
        super().check(secret, now)


def test_a_false_coordinator_gets_no_secret_by_showing_the_true_certificate_beside_its_own() -> None:
    """Everybody may read the true one at the control port, and it has the fingerprint that a token names."""

    async def scene(opened: Gate) -> None:
        false = TwoAuthorities.create()
        assert isinstance(false, TwoAuthorities)
        false.true = opened.authority.pem
        book = Thief(opened.authority.fingerprint)
        door = ControlServer(false, book, opened, (HERE, 0))
        serving = asyncio.create_task(door.run())
        try:
            with pytest.raises(AuthError, match=r"the certificate of .* was refused"):
                await join((HERE, door.port), opened.token(), "node-1")
        finally:
            await end_tasks(serving)
        assert book.stolen == b""

    play(scene)


@pytest.mark.parametrize("field", ["PROTOCOL", "__version__"])
def test_another_version_is_refused(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(opened: Gate) -> None:
        token = opened.token()
        with monkeypatch.context() as other:
            other.setattr(door_module, field, PROTOCOL + 1 if field == "PROTOCOL" else "9.9.9")
            with pytest.raises(AuthError, match="protocol") as caught:
                await join(opened.address, token, "node-1")
            assert "same version" in caught.value.hint

    play(scene)


def test_another_program_of_the_same_version_is_refused_unless_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(opened: Gate) -> None:
        token = opened.token(uses=3)
        await join(opened.address, token, "node-1")
        monkeypatch.setattr(join_module, "source_digest", lambda: "f" * 64)
        with pytest.raises(
            AuthError, match=r"the program on node-2 is not the coordinator's: .*ffffffffffff there"
        ) as caught:
            await join(opened.address, token, "node-2")
        assert "--allow-mixed" in caught.value.hint
        opened.door.own.add("node-2")  # which we have started ourselves
        await join(opened.address, token, "node-2")
        opened.door.allow_mixed = True
        await join(opened.address, token, "node-3")  # what was refused used up nothing

    play(scene)


def test_a_guest_that_lies_about_its_protocol_is_refused() -> None:
    async def scene(opened: Gate) -> None:
        answer = await ask_as_guest(opened, Join(99, "9", "n", opened.token().secret, make_request("n")[1], ""))
        assert isinstance(answer, Refused)
        assert "protocol 99" in answer.reason

    play(scene)


async def ask_as_guest(opened: Gate, message: Message) -> Message:
    context = guest_client(opened.authority.pem)
    channel = await connect_tls(opened.address, context, COORDINATOR, ToGuest, GUEST_BYTES, 1.0)
    await channel.write(QUESTION, 0, message)
    frame = await channel.receive_within(SOON)
    assert frame is not None
    assert await channel.receive_within(SOON) is None, "one answer, then it is closed"
    await channel.close()
    return frame.message


FORGED = "9\n12:00 ERROR tllm: run \x1b[1mcurl\x1b[0m\u202e"


def test_a_guest_writes_no_line_of_the_log_and_moves_no_cursor(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(opened: Gate) -> None:
        await ask_as_guest(opened, Join(PROTOCOL, FORGED, "n", b"", b"", ""))
        async with raw(opened.address, guest_client(opened.authority.pem)) as (reader, writer):
            body = msgspec.msgpack.encode({"type": "Hello", "protocol": 1, FORGED: 1})
            writer.write(HEAD.pack(len(body), QUESTION, 0) + body)
            await closed_within_a_second(reader)
        assert opened.door.refused == 2

    play(scene)
    told = [message for message in caplog.messages if "curl" in message]
    assert len(told) == 2 and all(message.isprintable() for message in told)


def test_who_answers_a_node_that_joins_moves_no_cursor_of_its_terminal() -> None:
    """It need not be the coordinator: nobody has shown a certificate yet."""

    class Unknown(ControlServer):
        def _reply(self, message: Message) -> Message:
            raise ClusterError(FORGED, FORGED)

    async def scene(opened: Gate) -> None:
        door = Unknown(Authority.create(), TokenBook(b""), opened, (HERE, 0))
        serving = asyncio.create_task(door.run())
        try:
            with pytest.raises(ClusterError, match="curl") as caught:
                await locate((HERE, door.port))
        finally:
            await end_tasks(serving)
        assert caught.value.message.isprintable() and caught.value.hint.isprintable()

    play(scene)


@pytest.mark.parametrize("message", [Heartbeat(), ReadBytes("config.json", 0, 9), Attach(PROTOCOL, facts())])
def test_without_a_certificate_a_members_message_is_nothing(message: Message) -> None:
    async def scene(opened: Gate) -> None:
        answer = await ask_as_guest(opened, message)
        assert isinstance(answer, Refused)
        assert "no message" in answer.reason
        assert opened.living == set()
        assert opened.door.refused == 1

    play(scene)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01" + b"A" * 60,
        bytes(300),
        HEAD.pack(5, QUESTION, 0) + b"hello",
    ],
    ids=["nothing", "http", "half a hello", "zeros", "a message in the clear"],
)
def test_plain_text_is_refused(said: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tllm.cluster.connection.HANDSHAKE_SECONDS", 0.8)

    async def scene(opened: Gate) -> None:
        async with raw(opened.address, None) as (reader, writer):
            writer.write(said)
            came = await closed_within_a_second(reader)
        assert b"CERTIFICATE" not in came
        await until(lambda: opened.door.refused == 1)
        assert "was refused" in caplog.text

    play(scene)


def test_tls_1_2_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(opened: Gate) -> None:
        context = unverified_client()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        for opened.is_ending in (False, True):  # who is told to end while it joins is no fault
            with pytest.raises(OSError):  # an alert, or a connection that is gone already
                async with raw(opened.address, context):
                    pass
            await until(lambda: opened.door.refused == 1 + opened.is_ending)
            assert caplog.text.count("older than 1.3") == 1

    play(scene)


@pytest.mark.parametrize(
    "said",
    [
        HEAD.pack(GUEST_BYTES + 1, QUESTION, 0),
        HEAD.pack(2**32 - 1, QUESTION, 0),
        HEAD.pack(3, QUESTION, 0) + b"\xc1\xc1\xc1",
        HEAD.pack(100, QUESTION, 0) + b"too little",
        b"",
    ],
    ids=["large", "huge", "no message", "half", "silent"],
)
def test_a_guest_that_says_nonsense_or_nothing(said: bytes) -> None:
    async def scene(opened: Gate) -> None:
        async with raw(opened.address, guest_client(opened.authority.pem)) as (reader, writer):
            writer.write(said)
            await closed_within_a_second(reader)
        await until(lambda: opened.door.refused == 1)

    play(scene)


def test_a_certificate_of_another_authority_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(opened: Gate) -> None:
        stranger = Authority.create().identity("node-1")
        forged = Identity("node-1", stranger.certificate, stranger.key, opened.authority.pem)
        async with asyncio.timeout(SOON):
            with pytest.raises((AuthError, ClusterError)):
                await attach(opened.address, forged, facts("node-1"))
        await until(lambda: opened.door.refused == 1)
        assert "not one of this cluster" in caplog.text

    play(scene)


def test_a_member_that_is_not_the_coordinator_cannot_pass_for_it() -> None:
    async def scene(opened: Gate) -> None:
        impostor = Authority.create()
        book = TokenBook(impostor.fingerprint)
        false_door = ControlServer(impostor, book, opened, (HERE, 0))
        task = asyncio.create_task(false_door.run())
        identity = await join(opened.address, opened.token(), "node-1")
        with pytest.raises(AuthError, match="certificate"):
            await attach((HERE, false_door.port), identity, facts("node-1"))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    play(scene)


def test_a_member_that_breaks_the_rules_is_shut_out_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(opened: Gate) -> None:
        identity = await join(opened.address, opened.token(), "node-1")
        channel, _ = await attach(opened.address, identity, facts("node-1"))
        await until(lambda: opened.living == {"node-1"})
        channel._writer.write(HEAD.pack(MEMBER_BYTES + 1, ONE_WAY, 0))
        assert await channel.receive_within(SOON) is None
        await until(lambda: opened.living == set())
        assert f"declares a message of {MEMBER_BYTES + 1} bytes" in caplog.text
        await channel.close()

    play(scene)


def test_many_silent_connections_do_not_keep_a_node_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tllm.cluster.connection.HANDSHAKE_SECONDS", 0.8)

    async def scene(opened: Gate) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(door_module.MAX_GUESTS + 20):
                await stack.enter_async_context(raw(opened.address, None))
            joining = asyncio.create_task(join(opened.address, opened.token(), "node-1"))
            await until(lambda: opened.door.refused >= door_module.MAX_GUESTS + 20, 5.0)
            assert (await asyncio.wait_for(joining, 10.0)).name == "node-1", "it was turned away, and knocked again"

    play(scene)


def test_nodes_that_come_at_once_all_get_in_through_a_narrow_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "MAX_GUESTS", 2)
    monkeypatch.setattr(join_module, "LONGEST_KNOCK", 0.4)

    async def enter(opened: Gate, node: str) -> Channel:
        identity = await join(opened.address, opened.token(), node)
        channel, _ = await attach(opened.address, identity, facts(node))
        return channel

    async def scene(opened: Gate) -> None:
        nodes = [f"node-{number}" for number in range(24)]
        channels = await asyncio.gather(*(enter(opened, node) for node in nodes))
        await until(lambda: opened.living == set(nodes))
        assert opened.door.refused > 0, "not all found room at first"
        for channel in channels:
            await channel.close()

    play(scene)


def test_who_hangs_up_again_and_again_is_no_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_module, "KNOCK_SECONDS", 0.8)
    monkeypatch.setattr(join_module, "time", SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time()))
    knocks: list[str] = []

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        knocks.append("")
        writer.transport.abort()

    async def scene(opened: Gate) -> None:
        server = await asyncio.start_server(hang_up, HERE, 0)
        port = int(server.sockets[0].getsockname()[1])
        with pytest.raises(ClusterError, match=f"127.0.0.1:{port} closed the connection before it was secure") as found:
            await join((HERE, port), opened.token(), "node-1")
        assert 2 <= len(knocks) <= 5 and "too many guests" in (found.value.hint or "")
        server.close()

    play(scene)


def test_nobody_there_is_said_in_words() -> None:
    async def scene(opened: Gate) -> None:
        with pytest.raises(ConfigError, match="cannot listen"):
            ControlServer(opened.authority, opened.tokens, opened, opened.address)
        free = ControlServer(opened.authority, opened.tokens, opened, (HERE, 0))
        free.close()
        with pytest.raises(ClusterError, match="cannot reach coordinator at 127"):
            await join((HERE, free.port), opened.token(), "node-1")

    play(scene)


def test_a_coordinator_that_comes_later_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(opened: Gate) -> None:
        place = (HERE, free_row(1))
        with pytest.raises(ClusterError, match="cannot reach coordinator at 127"):
            await locate(place)
        waits = asyncio.create_task(locate(place, 30.0))
        await until(lambda: "tries again for 30 s" in caplog.text)
        late = ControlServer(opened.authority, opened.tokens, opened, place)
        serves = asyncio.create_task(late.run())
        assert await waits == place
        serves.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serves

    play(scene)
    assert "cannot reach coordinator at 127" in caplog.text


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_module, "REACH_SECONDS", 0.3)

    async def scene(opened: Gate) -> None:
        held: list[asyncio.StreamWriter] = []

        async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            held.append(writer)

        server = await asyncio.start_server(mute, HERE, 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ClusterError, match=r"did not answer within 0\.3 s"):
            await join((HERE, port), opened.token(), "node-1")
        server.close()
        for writer in held:
            writer.transport.abort()

    play(scene)


def test_a_coordinator_answers_a_member_with_members_messages_only() -> None:
    async def scene(opened: Gate) -> None:
        identity = await join(opened.address, opened.token(), "node-1")
        channel = await connect_tls(opened.address, member_client(identity), COORDINATOR, ToNode, MEMBER_BYTES, 1.0)
        await channel.write(QUESTION, 0, Hello(PROTOCOL))
        assert await channel.receive_within(SOON) is None
        await channel.close()

    play(scene)
