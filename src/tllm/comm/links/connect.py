"""The dialling side of links, and `open_links`, by which a rank opens all its links of a plan.

A link is directed. Its source dials the target's `Listener`, says hello, and is welcomed or refused. Where the user
asked for gRPC or `torch.distributed`, each link is then replaced by one over that transport.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from tllm.cluster.certificates import Identity
from tllm.cluster.connection import NO_ADDRESS, Address, format_address
from tllm.cluster.settings import Wiring
from tllm.comm.links.errors import link_named
from tllm.comm.links.grpc_link import GrpcTransport
from tllm.comm.links.handshake import (
    LINK_WELCOMES,
    LinkHello,
    peer_certificate,
    receive_message,
    send_message,
    start_tls,
)
from tllm.comm.links.link import DEADLINE, Link, break_off
from tllm.comm.links.listener import Authorize, Listener
from tllm.comm.links.tcp_link import TcpLink, set_socket_options
from tllm.comm.links.torch_link import TorchTransport
from tllm.comm.links.transport_link import Transport
from tllm.core.errors import AuthError, FrameError, LinkClosed, LinkTimeout, TllmError
from tllm.spec.plan import Wire

__all__ = ["Authorize", "LinkHello", "LinkOptions", "Listener", "connect", "open_links", "transport_for"]

RETRY_SECONDS = 0.05
DIAL_SECONDS = 3.0  # for one try, after which it may be seen that the epoch is over
ANSWER_SECONDS = 10.0  # for a listener that took the connection: a process that is stopped never answers
DIAL_THREADS = 4  # most of a handshake over a network is waiting for the other end

logger = logging.getLogger("tllm.comm")


class Cancellation(Protocol):
    """A threading.Event, or what is waited for in the same way."""

    def wait(self, timeout: float) -> bool:
        """Whether the link is not wanted any more, within `timeout` seconds."""


@dataclass(frozen=True)
class LinkOptions:
    """How `open_links` opens links.

    `context` is for TLS when dialling; without one links are plain TCP. `authorize(hello, certificate)` raises
    AuthError when a listener's certificate may not speak for `hello.target`. `deadline` is the seconds in which all
    links must be open. `transport`, if given, makes the links that replace ours.
    """

    context: ssl.SSLContext | None = None
    authorize: Authorize | None = None
    deadline: float = DEADLINE
    transport: Transport | None = None


PLAIN = LinkOptions()


def transport_for(wiring: Wiring, identity: Identity, hosts: Collection[str]) -> Transport | None:
    """The transport of the kind of link that the user chose, between `hosts`; None for our own, TLS over TCP.

    ConfigError where gRPC is not installed. AuthError where `torch` is asked for between hosts whose network nobody has
    called trusted.
    """
    match wiring.kind:
        case "tls":
            return None
        case "grpc":
            return GrpcTransport(identity)
        case "torch":
            return TorchTransport(hosts, wiring.trusted)


def connect(
    address: Address,
    context: ssl.SSLContext | None,
    hello: LinkHello,
    deadline: float = DEADLINE,
    authorize: Authorize | None = None,
    cancelled: Cancellation | None = None,
) -> TcpLink:
    """Open the link that `hello` names, to the listener at `address`.

    Tries again, for up to `deadline` seconds or until it is `cancelled`, while no listener is there or the listener has
    not begun the epoch. `authorize(hello, certificate)` raises AuthError when the listener's certificate may not speak
    for `hello.target`. LinkTimeout after the deadline, LinkClosed where the listener refuses the link, AuthError where
    one end does not trust the other.
    """
    until = time.monotonic() + deadline
    cancelled = cancelled or threading.Event()
    while True:
        try:
            return _try(address, context, hello, until, authorize)
        except _TryAgain as error:
            if time.monotonic() + RETRY_SECONDS > until or cancelled.wait(RETRY_SECONDS):
                where = _name(hello, address)
                raise LinkTimeout(
                    f"rank {hello.source} could not open its {link_named(hello.name)} to {where} "
                    f"within {deadline:.3g} s: {error}",
                    f"see whether rank {hello.target} runs and that address is right",
                ) from error


def open_links(
    rank: int,
    addresses: Mapping[int, Address],
    listener: Listener,
    wires: Iterable[Wire],
    *,
    cluster: str,
    epoch: int,
    options: LinkOptions = PLAIN,
) -> dict[Wire, Link]:
    """Open this rank's links of the `wires`: dial where it is the source, accept where it is the target.

    Every rank of the plan calls this with the same wires. If one link fails, all that are open are closed and the error
    is raised; its `peer` is the rank at the other end.
    """
    until = time.monotonic() + options.deadline
    mine = [wire for wire in wires if rank in (wire.source, wire.target)]
    over = listener.expect(cluster, epoch, [wire for wire in mine if wire.target == rank])
    links: dict[Wire, Link] = {}

    def hello_of(wire: Wire) -> LinkHello:
        return LinkHello(cluster, epoch, *wire)

    def dial(wire: Wire) -> None:
        address, left = addresses[wire.target], max(until - time.monotonic(), 0.0)
        with _with_peer(wire.target):
            links[wire] = connect(address, options.context, hello_of(wire), left, options.authorize, over)

    try:
        _dial_all([wire for wire in mine if wire.source == rank], dial, over)
        for wire in mine:
            if wire.target == rank:
                with _with_peer(wire.source):
                    links[wire] = listener.accept(wire, max(until - time.monotonic(), 0.0), over)
        if options.transport is not None:
            _replace_all(options.transport, rank, links, hello_of, addresses, until)
    except TllmError:
        break_off(links.values())
        raise
    return links


@contextlib.contextmanager
def _with_peer(rank: int) -> Iterator[None]:
    """What fails here is between this rank and the one that is named."""
    try:
        yield
    except TllmError as error:
        error.peer = rank
        raise


def _replace_all(
    transport: Transport,
    rank: int,
    links: dict[Wire, Link],
    hello_of: Callable[[Wire], LinkHello],
    addresses: Mapping[int, Address],
    until: float,
) -> None:
    """Replace each link of this rank by one over the transport: all at once, as each waits for the rank at its end."""
    here = addresses[rank][0]

    def replace(wire: Wire) -> None:
        ours, hello, left = links[wire], hello_of(wire), max(until - time.monotonic(), 0.001)
        if wire.source == rank:
            with _with_peer(wire.target):
                links[wire] = transport.open_source(ours, hello, here, left)
        else:
            with _with_peer(wire.source):
                links[wire] = transport.open_target(ours, hello, addresses[wire.source][0], here, left)

    with ThreadPoolExecutor(max(len(links), 1), "link transport") as pool:
        for future in [pool.submit(replace, wire) for wire in list(links)]:
            future.result()


def _dial_all(wires: Sequence[Wire], dial: Callable[[Wire], None], cancelled: threading.Event) -> None:
    """Dial several at once; the first that fails cancels the others, and its error is raised."""
    with ThreadPoolExecutor(DIAL_THREADS, "link dial") as pool:
        futures = [pool.submit(dial, wire) for wire in wires]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failures = [error for future in done if (error := future.exception()) is not None]
        if failures:
            cancelled.set()
            pool.shutdown(cancel_futures=True)
            raise failures[0]


class _TryAgain(Exception):
    """The other end may be ready in a moment."""


def _try(
    address: Address, context: ssl.SSLContext | None, hello: LinkHello, until: float, authorize: Authorize | None
) -> TcpLink:
    """Dial and shake hands once."""
    sock = _dial(address, hello, until)
    until = min(until, time.monotonic() + ANSWER_SECONDS)
    sock.settimeout(max(until - time.monotonic(), 0.001))
    welcomed = False
    try:
        if context is not None:
            sock = start_tls(sock, context, address[0])
        if authorize is not None:
            authorize(hello, peer_certificate(sock))
        send_message(sock, hello, until)
        answer = receive_message(sock, LINK_WELCOMES, until)
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
        raise _TryAgain(answer.refused)
    if answer.refused:
        logger.warning("%s refused the link from rank %d: %s", _name(hello, address), hello.source, answer.refused)
        raise LinkClosed(f"{_name(hello, address)} refused the link from rank {hello.source}: {answer.refused}")
    return TcpLink(sock, hello.source, hello.target, hello.epoch)


def _dial(address: Address, hello: LinkHello, until: float) -> socket.socket:
    try:
        sock = socket.create_connection(address, timeout=min(max(until - time.monotonic(), 0.001), DIAL_SECONDS))
    except (ConnectionRefusedError, TimeoutError) as error:
        raise _TryAgain(str(error)) from error
    except (OSError, *NO_ADDRESS) as error:
        raise LinkClosed(
            f"rank {hello.source} cannot reach {_name(hello, address)}: {getattr(error, 'strerror', None) or error}",
            "a machine with several networks is reached at the address that it is given: --cluster-host of the first "
            "machine, --listen of `tllm join`",
        ) from error
    set_socket_options(sock)
    return sock


def _distrusted(hello: LinkHello, address: Address, why: str) -> AuthError:
    logger.warning("%s and rank %d do not trust each other: %s", _name(hello, address), hello.source, why)
    return AuthError(
        f"{_name(hello, address)} and rank {hello.source} do not trust each other: {why}",
        "both nodes must have joined the same cluster, with or without TLS alike; its log says more",
    )


def _name(hello: LinkHello, address: Address) -> str:
    return f"rank {hello.target} at {format_address(address)}"
