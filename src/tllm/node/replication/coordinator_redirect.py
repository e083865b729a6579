"""`CoordinatorRedirect`: sends those who join at the first machine's address on to the machine that coordinates now."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable

from tllm.cluster.certificates import COORDINATOR, Authority
from tllm.cluster.channel import ANSWER
from tllm.cluster.connection import Address, accept_tls, format_address, listen, reason_of, serve_connections
from tllm.cluster.messages import GUEST_BYTES, PROTOCOL, FromGuest, Hello, Refused, Welcome
from tllm.cluster.tls import control_server
from tllm.core.errors import TllmError

log = logging.getLogger("tllm.node")

ANSWER_SECONDS = 4.0
MAX_GUESTS = 64

Find = Callable[[], Awaitable[Address | None]]
"""find(): where the coordinator listens, None where there is none"""


class CoordinatorRedirect:
    """Listens from when it is made; `start` answers in a thread of its own until the process ends.

    It answers `Hello` and nothing else: a node then joins at the coordinator itself, and holds the certificate that it
    finds there against its token.
    """

    def __init__(self, address: Address, authority: Authority, find: Find) -> None:
        self._authority, self._find = authority.pem, find
        self._context = control_server(authority.identity(COORDINATOR))
        self._guests = 0
        self._socket = listen(*address)
        self.address: Address = (address[0], int(self._socket.getsockname()[1]))

    def start(self) -> None:
        """Answer from now on."""
        threading.Thread(target=lambda: asyncio.run(self.run()), name="door", daemon=True).start()

    async def run(self) -> None:
        """Answer until cancelled."""
        await serve_connections(self._socket, self._serve)

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        if self._guests >= MAX_GUESTS:
            sock.close()
            return
        self._guests += 1
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._answer(sock, peer)
        except (OSError, TllmError) as error:  # a time that is over is an OSError too
            why = error.message if isinstance(error, TllmError) else reason_of(error)
            log.warning("%s was not told where the coordinator is: %s", peer, why)
        finally:
            self._guests -= 1
            sock.close()

    async def _answer(self, sock: socket.socket, peer: str) -> None:
        channel = await accept_tls(sock, self._context, peer, FromGuest, GUEST_BYTES)
        try:
            frame = await channel.receive()
            if frame is None:
                return
            found = await self._find() if isinstance(frame.message, Hello) else None
            if found is None:
                no = Refused("the coordinator is elsewhere, and not to be found at the moment", kind="cluster")
                await channel.write(ANSWER, frame.number, no)
                return
            log.info("sends %s to the coordinator at %s", peer, format_address(found))
            await channel.write(ANSWER, frame.number, Welcome(PROTOCOL, self._authority, *found))
        finally:
            await channel.close()
