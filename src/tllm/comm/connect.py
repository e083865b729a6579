"""How links come to be: the source dials its target's listener, says hello, and is welcomed or refused."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Iterable, Mapping

from tllm.comm.handshake import Hello, Welcome, hear, peer_certificate, say
from tllm.comm.link import DEADLINE, Link
from tllm.comm.listener import Authorize, Listener
from tllm.comm.tcp import TcpLink, tune
from tllm.ground.errors import AuthError, FrameError, LinkClosed, LinkError, LinkTimeout

__all__ = ["Authorize", "Hello", "Listener", "connect", "open_links"]

RETRY_SECONDS = 0.05

Address = tuple[str, int]

logger = logging.getLogger("tllm.comm")


def connect(
    address: Address,
    context: ssl.SSLContext | None,
    hello: Hello,
    deadline: float = DEADLINE,
    authorize: Authorize | None = None,
) -> TcpLink:
    """Open the link that `hello` names, to the listener at `address`.

    Waits, up to `deadline`, for a listener that is not up yet or has not begun the epoch.
    `authorize(hello, certificate)` raises AuthError when the listener's certificate may not speak for `hello.target`.
    """
    until = time.monotonic() + deadline
    while True:
        try:
            return _try(address, context, hello, until, authorize)
        except _NotYet as error:
            if time.monotonic() + RETRY_SECONDS > until:
                where = _name(hello, address)
                raise LinkTimeout(
                    f"rank {hello.source} could not open its link to {where} within {deadline:.3g} s: {error}",
                    f"see whether rank {hello.target} runs and that address is right",
                ) from error
        time.sleep(RETRY_SECONDS)


def open_links(
    rank: int,
    addresses: Mapping[int, Address],
    listener: Listener,
    pairs: Iterable[tuple[int, int]],
    *,
    cluster: str,
    epoch: int,
    context: ssl.SSLContext | None = None,
    deadline: float = DEADLINE,
    authorize: Authorize | None = None,
) -> dict[tuple[int, int], Link]:
    """Open this rank's part of the directed `pairs` (source, target): dial where it is source, wait where it is target.

    Every rank of the plan calls this with the same pairs. `context` and `authorize` are for dialling.
    """
    until = time.monotonic() + deadline
    mine = [(source, target) for source, target in pairs if rank in (source, target)]
    listener.expect(cluster, epoch, [pair for pair in mine if pair[1] == rank])
    links: dict[tuple[int, int], Link] = {}
    try:
        for source, target in mine:
            left = max(until - time.monotonic(), 0.0)
            if source == rank:
                hello = Hello(cluster, epoch, source, target)
                links[source, target] = connect(addresses[target], context, hello, left, authorize)
        for source, target in mine:
            left = max(until - time.monotonic(), 0.0)
            if target == rank:
                links[source, target] = listener.take(source, target, left)
    except (LinkError, AuthError):
        for link in links.values():
            link.close()
        raise
    return links


class _NotYet(Exception):
    """The other end may be ready in a moment."""


def _try(
    address: Address, context: ssl.SSLContext | None, hello: Hello, until: float, authorize: Authorize | None
) -> TcpLink:
    sock = _dial(address, hello, until)
    welcomed = False
    try:
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname=address[0])
        if authorize is not None:
            authorize(hello, peer_certificate(sock))
        say(sock, hello, until)
        answer = hear(sock, Welcome, until)
        welcomed = not answer.refused
    except (ssl.SSLError, FrameError) as error:
        raise _distrusted(hello, address, str(error)) from error
    except TimeoutError as error:
        raise LinkTimeout(
            f"{_name(hello, address)} took the connection of rank {hello.source} and said nothing"
        ) from error
    except OSError as error:
        raise _distrusted(hello, address, f"{error} before any answer") from error
    finally:
        if not welcomed:
            sock.close()
    if answer.again:
        raise _NotYet(answer.refused)
    if answer.refused:
        logger.warning("%s refused the link from rank %d: %s", _name(hello, address), hello.source, answer.refused)
        raise LinkClosed(f"{_name(hello, address)} refused the link from rank {hello.source}: {answer.refused}")
    return TcpLink(sock, hello.source, hello.target, hello.epoch)


def _dial(address: Address, hello: Hello, until: float) -> socket.socket:
    try:
        sock = socket.create_connection(address, timeout=max(until - time.monotonic(), 0.001))
    except (ConnectionRefusedError, TimeoutError) as error:
        raise _NotYet(str(error)) from error
    except OSError as error:
        raise LinkClosed(
            f"rank {hello.source} cannot reach {_name(hello, address)}: {error}", "see whether that address is right"
        ) from error
    tune(sock)
    return sock


def _distrusted(hello: Hello, address: Address, why: str) -> AuthError:
    logger.warning("%s and rank %d do not trust each other: %s", _name(hello, address), hello.source, why)
    return AuthError(
        f"{_name(hello, address)} and rank {hello.source} do not trust each other: {why}",
        "both nodes must have joined the same cluster, with or without TLS alike; its log says more",
    )


def _name(hello: Hello, address: Address) -> str:
    return f"rank {hello.target} at {address[0]}:{address[1]}"
