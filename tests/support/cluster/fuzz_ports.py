"""The two ports of a cluster, opened for real and spoken to in damaged words, by strangers, guests and members."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping

import msgspec

from tests.support.cluster.fuzz_readers import (
    BYTES,
    GREETING,
    LIMIT,
    SECONDS,
    TENSOR,
    corpora,
    from_guest,
    from_node,
    hear_hello,
    twisted,
)
from tests.unit.cluster.kits import facts
from tllm.cluster.certificates import COORDINATOR, Authority
from tllm.cluster.channel import END, HEAD, REFUSAL, Act, Channel
from tllm.cluster.connection import Address
from tllm.cluster.control_server import ControlServer
from tllm.cluster.join import attach, join
from tllm.cluster.join_token import TokenBook
from tllm.cluster.messages import FromGuest, FromNode, Heartbeat
from tllm.cluster.tls import data_client, data_server, guest_client
from tllm.comm.links import frame
from tllm.comm.links.handshake import LINK_WELCOMES, LinkWelcome, receive_message, send_message
from tllm.comm.links.listener import Listener
from tllm.core.errors import UNREADABLE, FrameError, LinkError, TllmError
from tllm.node.coordinator.membership import Membership

HERE = "127.0.0.1"
TENSOR_TLS, BYTES_TLS = (  # over TLS a frame's checksum covers its header alone
    frame.seal_header(whole[: frame.CRC_AT], b"") + whole[frame.HEADER_SIZE :] for whole in (TENSOR, BYTES)
)
SOON, ENDS = 0.05, 60.0
"""Seconds: how long one is listened to that may be silent; when what said something wrong must have been closed."""


class NodePort:
    """A node that expects one link, over and over. `counts` says what became of who came."""

    def __init__(self) -> None:
        authority = Authority.create()
        self.counts: Counter[str] = Counter()
        self._member = data_client(authority.identity("node-a"))
        self._stranger = guest_client(authority.pem)
        self._stranger.check_hostname = False
        self._threads = threading.active_count()
        self._listener = Listener(HERE, 0, data_server(authority.identity("node-b")))
        self._expect()

    def __enter__(self) -> NodePort:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        until = time.monotonic() + ENDS
        while threading.active_count() > self._threads and time.monotonic() < until:
            time.sleep(0.01)
        assert threading.active_count() <= self._threads, "a thread of the port still waits"

    def attack(self, dice: random.Random) -> None:
        """One connection with something wrong about it, which must be refused and closed; or right by chance."""
        how = dice.choice((self._plain, self._uninvited, self._hello, self._hello, self._frame, self._frame))
        how(dice)

    def check_unharmed(self) -> None:
        """The node that is expected still gets its link."""
        with self._dial(self._member) as sock:
            self._greet(sock)
            sock.sendall(BYTES_TLS)
            link = self._listener.accept(GREETING.wire, SECONDS)
            assert link.recv_bytes(LIMIT) == b"hello"
            link.close()
        self._expect()

    def _plain(self, dice: random.Random) -> None:
        """No TLS at all."""
        before = self._listener.refused
        with socket.create_connection(self._listener.address) as sock:
            self._is_refused(sock, twisted(dice, corpora[hear_hello]) or b"\0", before)

    def _uninvited(self, dice: random.Random) -> None:
        """TLS without a certificate, which a client of TLS 1.3 hears of only when it reads."""
        before = self._listener.refused
        with contextlib.suppress(ssl.SSLError, ConnectionError), self._dial(self._stranger) as sock:
            self._is_refused(sock, twisted(dice, corpora[hear_hello]), before)

    def _hello(self, dice: random.Random) -> None:
        before = self._listener.refused
        with self._dial(self._member) as sock:
            data = twisted(dice, corpora[hear_hello])
            if not data.startswith(corpora[hear_hello][0]):
                self._is_refused(sock, data, before)
                return
            sock.sendall(data)
            self._listener.accept(GREETING.wire, SECONDS).close()
        self.counts["taken"] += 1
        self._expect()

    def _frame(self, dice: random.Random) -> None:
        """A good hello, and then a frame that the plan does not have."""
        data = twisted(dice, (TENSOR_TLS, BYTES_TLS))
        with self._dial(self._member) as sock:
            self._greet(sock)
            link = self._listener.accept(GREETING.wire, SECONDS)
            sock.sendall(data)
            _end(sock)
            try:
                link.recv_bytes(LIMIT)
                self.counts["taken"] += 1
            except LinkError as error:
                self.counts["frames refused" if isinstance(error, FrameError) else "frames torn"] += 1
            link.close()
        self._expect()

    def _greet(self, sock: socket.socket) -> None:
        send_message(sock, GREETING, time.monotonic() + SECONDS)
        assert receive_message(sock, LINK_WELCOMES, time.monotonic() + SECONDS) == LinkWelcome()

    def _is_refused(self, sock: socket.socket, data: bytes, before: int) -> None:
        with contextlib.suppress(OSError):
            sock.sendall(data)
            _end(sock)
        sock.settimeout(ENDS)
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            while sock.recv(1 << 16):
                pass
        until = time.monotonic() + ENDS
        while self._listener.refused == before and time.monotonic() < until:
            time.sleep(0.0005)
        assert self._listener.refused == before + 1, "it was not counted"
        self.counts["hellos refused"] += 1

    def _dial(self, context: ssl.SSLContext) -> socket.socket:
        return context.wrap_socket(socket.create_connection(self._listener.address), server_hostname=HERE)

    def _expect(self) -> None:
        self._listener.expect(GREETING.cluster, GREETING.epoch, [GREETING.wire])


def _end(sock: socket.socket) -> None:
    """Nothing more will be said; what was said before is still read."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_WR)


class ControlPort:
    """A coordinator's door with members behind it. `counts` says what became of who came."""

    def __init__(self) -> None:
        self._authority = Authority.create()
        self._tokens = TokenBook(self._authority.fingerprint)
        self.counts: Counter[str] = Counter()
        self.members = Membership(
            self._authority.cluster, self._acts, lambda node, error: None, lambda: None, self._lend
        )
        self.door = ControlServer(self._authority, self._tokens, self.members, (HERE, 0))
        self.address: Address = (HERE, self.door.port)

    async def begin(self) -> None:
        """Let a member have its certificate; it comes back with it again and again."""
        self._identity = await join(self.address, self._tokens.issue(time.time()), "node-a")

    async def attack(self, dice: random.Random) -> None:
        """One connection that says something wrong, or right by chance, and is closed."""
        await (self._guest if dice.random() < 0.5 else self._member)(dice)

    async def check_unharmed(self) -> None:
        channel, _ = await attach(self.address, self._identity, facts("node-a"))
        await channel.send(Heartbeat(stats={"batches": 7.0}))
        await self._until(lambda: (m := self.members.state.member("node-a")) and m.beat.stats == {"batches": 7.0})
        await channel.close()
        await self._gone()

    async def _guest(self, dice: random.Random) -> None:
        data = twisted(dice, corpora[from_guest])
        before = self.door.refused
        reader, writer = await asyncio.open_connection(
            *self.address, ssl=guest_client(self._authority.pem), server_hostname=COORDINATOR
        )
        with contextlib.suppress(OSError, TimeoutError):
            writer.write(data)
            async with asyncio.timeout(SOON):  # half a message would be waited for, so that its guest has to go
                await reader.read()
        writer.transport.abort()
        await self._until(lambda: self.door._guests == 0)
        is_good = _is_hello(data)
        assert self.door.refused > before or is_good, "it was not counted"
        self.counts["taken" if is_good else "guests refused"] += 1

    async def _member(self, dice: random.Random) -> None:
        before = self.door.refused_frames
        channel, _ = await attach(self.address, self._identity, facts("node-a"))
        channel._writer.write(twisted(dice, corpora[from_node]))
        channel._writer.close()
        with contextlib.suppress(TllmError, OSError):
            async with asyncio.timeout(ENDS):
                while await channel.receive() is not None:
                    pass
        channel.abort()
        await self._gone()
        self.counts["messages refused" if self.door.refused_frames > before else "taken"] += 1

    async def _gone(self) -> None:
        await self._until(lambda: not self.members.channels)

    async def _lend(self, channel: Channel, node: str) -> None:
        """Whoever comes to read weights: what it says is read to its end."""
        while await channel.receive() is not None:
            self.counts["borrowed"] += 1

    def _acts(self, node: str) -> Mapping[type, Act]:
        """Every kind of message that a member may send has its place here."""

        async def heard(message: object) -> None:
            self.counts["heard"] += 1

        kinds = (kind for kind in FromNode.__args__ if kind.__name__ not in ("Attach", "Heartbeat", "Failure"))
        return dict.fromkeys(kinds, heard)

    async def _until(self, holds: object) -> None:
        async with asyncio.timeout(ENDS):
            while not holds():  # type: ignore[operator]
                await asyncio.sleep(0.001)


def _is_hello(data: bytes) -> bool:
    """Whether this begins with what a guest may say, be it after some damage."""
    if len(data) < HEAD.size or data[4] in (END, *range(REFUSAL + 1, 256)):
        return False
    body = data[HEAD.size :][: HEAD.unpack_from(data)[0]]
    try:
        msgspec.msgpack.decode(body, type=FromGuest)
    except UNREADABLE:
        return False
    return len(body) == HEAD.unpack_from(data)[0]


@contextlib.asynccontextmanager
async def control_port() -> AsyncIterator[ControlPort]:
    """An open one; what goes wrong behind the door comes out here."""
    port = ControlPort()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(port.door.run())
        await port.begin()
        yield port
        running.cancel()
