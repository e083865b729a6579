"""`ControlServer`: the control port. Lets guests ask who we are and join, passes members on, and shows everyone else
out."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Protocol

from tllm import __version__
from tllm.cluster.certificates import COORDINATOR, Authority, check_name
from tllm.cluster.channel import ANSWER, Channel
from tllm.cluster.connection import Address, accept_tls, listen, reason_of, serve_connections
from tllm.cluster.join_token import StaleToken, TokenBook
from tllm.cluster.messages import (
    GUEST_BYTES,
    MEMBER_BYTES,
    PROTOCOL,
    FromGuest,
    FromNode,
    Hello,
    Join,
    Joined,
    Message,
    Refused,
    Welcome,
)
from tllm.cluster.remote_errors import printable, refused
from tllm.cluster.tls import control_server
from tllm.core.errors import AuthError, ClusterError, TllmError
from tllm.core.program import source_digest

log = logging.getLogger("tllm.cluster")

GUEST_SECONDS = 5.0
"""For its first message and our answer: an honest guest sends at once, but its machine may be busy."""
MAX_GUESTS = 64  # connections that have not shown a certificate yet


class Members(Protocol):
    """Who is in the cluster already."""

    @property
    def is_ending(self) -> bool:
        """Whether all of them were told to end."""

    def is_here(self, node: str) -> bool:
        """Whether a living node has this name."""

    async def admit(self, channel: Channel, node: str) -> None:
        """Serve a node with a certificate until it goes; its connection is closed then."""


class ControlServer:
    """Listens from the moment it is made; `run` serves until cancelled.

    `identity` is the coordinator's. `refused` counts who was shown out, `refused_frames` what members sent that is no
    message of theirs.

    A node must run our very program, unless `allow_mixed`; those in `own` do, as we start them. Of who was refused
    with a token that was good before, `tokens.on_stale()` hears.
    """

    def __init__(self, authority: Authority, tokens: TokenBook, members: Members, address: Address) -> None:
        self._authority = authority
        self._tokens = tokens
        self._members = members
        self.identity = authority.identity(COORDINATOR)
        self._context = control_server(self.identity)
        self._guests = 0
        self.refused = self.refused_frames = 0
        self.allow_mixed = False
        self.own: set[str] = set()
        self._socket = listen(*address)
        self.port = int(self._socket.getsockname()[1])

    async def run(self) -> None:
        """Accept for ever. A fault of ours in serving one connection ends this; a fault of the other end does not."""
        await serve_connections(self._socket, self._serve)

    def close(self) -> None:
        """Stop listening, if `run` has not begun."""
        self._socket.close()

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        if self._guests >= MAX_GUESTS:
            sock.close()
            self._refuse(peer, f"{MAX_GUESTS} connections without a certificate are open already")
            return
        self._guests += 1
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = await accept_tls(sock, self._context, peer, FromGuest, GUEST_BYTES)
            name = channel.peer_name()
            if name is None:
                await self._guest(channel)
                return
        except OSError as error:
            sock.close()
            self._refuse(peer, reason_of(error))
            return
        finally:
            self._guests -= 1
        channel.promote(name, FromNode, MEMBER_BYTES)
        try:
            await self._members.admit(channel, name)
        except TllmError as error:
            log.warning("%s was shut out: %s", name, error.message)
        finally:
            self.refused_frames += channel.refused
            await channel.close()

    async def _guest(self, channel: Channel) -> None:
        """One message, one answer, in time."""
        try:
            async with asyncio.timeout(GUEST_SECONDS):
                frame = await channel.receive()
                if frame is None:
                    raise ClusterError("it closed without a word")
                await channel.write(ANSWER, frame.number, self._reply(frame.message))
        except TimeoutError:
            self._refuse(channel.peer, f"no message within {GUEST_SECONDS:g} s")
            channel.abort()
        except TllmError as error:
            self._refuse(channel.peer, printable(error.message))
            await self._say_no(channel, refused(error))
        finally:
            await channel.close()

    async def _say_no(self, channel: Channel, no: Refused) -> None:
        try:
            await channel.write(ANSWER, 0, no)
        except ClusterError:  # it did not wait to hear it
            channel.abort()

    def _reply(self, message: Message) -> Message:
        match message:
            case Hello():
                # The certificate is public, and the other end compares protocols.
                return Welcome(PROTOCOL, self._authority.pem)
            case Join():
                return Joined(self._sign(message))
            case _:
                raise AuthError(f"a {type(message).__name__} needs a certificate")

    def _sign(self, join: Join) -> bytes:
        if (join.protocol, join.version) != (PROTOCOL, __version__):
            raise AuthError(
                f"the node runs tllm {join.version} (protocol {join.protocol}), "
                f"the coordinator runs {__version__} (protocol {PROTOCOL})",
                "install the same version of tllm on every machine",
            )
        if join.source != source_digest() and not self.allow_mixed and join.node not in self.own:
            raise AuthError(
                f"the program on {join.node} is not the coordinator's: its source has digest {join.source[:12]} there "
                f"and {source_digest()[:12]} here, both in version {__version__}",
                "install the same on every machine, or start the coordinator with --allow-mixed",
            )
        now = time.time()
        try:
            self._tokens.check(join.secret, now)
        except StaleToken:
            self._tokens.on_stale()
            raise
        check_name(join.node)
        if self._members.is_here(join.node):
            raise AuthError(f"a node named {join.node} is here already", "give the new node another name")
        certificate = self._authority.sign(join.request, join.node)
        self._tokens.redeem(join.secret, now)
        log.info("%s has a certificate now", join.node)
        return certificate

    def _refuse(self, peer: str, reason: str) -> None:
        self.refused += 1
        # Nodes that are ended while they join break their handshakes off.
        log.log(logging.DEBUG if self._members.is_ending else logging.WARNING, "%s was refused: %s", peer, reason)
