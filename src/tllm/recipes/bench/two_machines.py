"""How the two machines of a benchmark find each other: the first listens and shows a token, the second has it.

As in a cluster, the token pins the certificate authority of the first machine, and admits one other machine, which gets
a certificate for its own key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tllm.cluster.certificates import Authority, Identity
from tllm.cluster.channel import Channel
from tllm.cluster.connection import own_address
from tllm.cluster.control_server import ControlServer
from tllm.cluster.join import join
from tllm.cluster.join_token import HOUR, JoinToken, TokenBook
from tllm.cluster.tls import data_client, data_server
from tllm.comm.links.connect import LinkHello, Listener, connect
from tllm.comm.links.link import Link
from tllm.core.errors import AuthError
from tllm.recipes.bench.processes import SERVICES, Seat
from tllm.spec.plan import Wire

Address = tuple[str, int]
MEETING, EPOCH = "bench meeting", 1
WIRE = Wire(1, 0, "meeting")
HOST_BYTES = 256
FIRST, SECOND = "bench-0", "bench-1"


def wait_for_second_machine(address: Address, show: Callable[[str], None]) -> Seat:
    """Wait for the other machine, an hour at most; `show` gets the token to enter there. This machine is rank 0."""
    host, port = address
    authority = Authority.create()
    identity = authority.identity(FIRST)
    book = TokenBook(authority.fingerprint)
    listener = Listener(host, port + 1, data_server(identity))
    try:
        listener.expect(MEETING, EPOCH, [WIRE])
        show(str(book.issue(time.time())))
        server = ControlServer(authority, book, _NoMembers(), address)
        link = asyncio.run(_admit_second_machine(server, listener))
    finally:
        listener.close()
    second = link.recv_bytes(HOST_BYTES).decode()
    link.close()
    return _seat(0, host, second, port, identity)


def connect_to_first_machine(address: Address, token: str) -> Seat:
    """Connect to the machine that listens at `address`; this machine is rank 1."""
    host, port = address
    identity = asyncio.run(join(address, JoinToken.parse(token), SECOND))
    here = own_address(address)
    link = connect((host, port + 1), data_client(identity), LinkHello(MEETING, EPOCH, *WIRE))
    link.send_bytes(here.encode())
    link.close()
    return _seat(1, host, here, port, identity)


async def _admit_second_machine(server: ControlServer, listener: Listener) -> Link:
    serving = asyncio.create_task(server.run())
    try:
        return await asyncio.to_thread(listener.accept, WIRE, HOUR)
    finally:
        serving.cancel()
        await asyncio.wait([serving])


class _NoMembers:
    """A bench has none."""

    is_ending = False

    def is_here(self, node: str) -> bool:
        return False

    async def admit(self, channel: Channel, node: str) -> None:
        raise AuthError(f"{node} wants to be a member, and this is a bench")


def _seat(rank: int, first: str, second: str, port: int, identity: Identity) -> Seat:
    ports = (port + SERVICES, port + 2 * SERVICES)
    return Seat(rank, (first, second), ports, identity.certificate, identity.key, identity.authority)
