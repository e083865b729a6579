"""How links come to be: the source dials its target's listener, says hello, and is welcomed or refused."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Protocol

from tllm.comm.links.carried_link import Carry
from tllm.comm.links.errors import link_named
from tllm.comm.links.handshake import LinkHello, LinkWelcome, hear, peer_certificate, say
from tllm.comm.links.link import DEADLINE, Link
from tllm.comm.links.listener import Authorize, Listener
from tllm.comm.links.tcp_link import TcpLink, tune
from tllm.core.errors import AuthError, FrameError, LinkClosed, LinkError, LinkTimeout, TllmError
from tllm.spec.plan import Wire

__all__ = ["Authorize", "LinkHello", "Listener", "connect", "open_links"]

RETRY_SECONDS = 0.05
DIAL_SECONDS = 3.0  # for one try, after which it may be seen that the epoch is over
ANSWER_SECONDS = 10.0  # for a listener that took the connection: a process that is stopped never answers
DIALLERS = 4  # threads: most of a handshake over a network is waiting for the other end

Address = tuple[str, int]

logger = logging.getLogger("tllm.comm")


class GivenUp(Protocol):
    """An event, or what is waited for as one."""

    def wait(self, timeout: float) -> bool:
        """Whether a link is not wanted any more, within so many seconds."""


def connect(
    address: Address,
    context: ssl.SSLContext | None,
    hello: LinkHello,
    deadline: float = DEADLINE,
    authorize: Authorize | None = None,
    given_up: GivenUp | None = None,
) -> TcpLink:
    """Open the link that `hello` names, to the listener at `address`.

    Waits, up to `deadline` or until it is `given_up`, for a listener that is not up yet or has not begun the epoch.
    `authorize(hello, certificate)` raises AuthError when the listener's certificate may not speak for `hello.target`.
    """
    until = time.monotonic() + deadline
    given_up = given_up or threading.Event()
    while True:
        try:
            return _try(address, context, hello, until, authorize)
        except _NotYet as error:
            if time.monotonic() + RETRY_SECONDS > until or given_up.wait(RETRY_SECONDS):
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
    context: ssl.SSLContext | None = None,
    deadline: float = DEADLINE,
    authorize: Authorize | None = None,
    carry: Carry | None = None,
) -> dict[Wire, Link]:
    """Open this rank's part of the `wires`: dial where it is source, wait where it is target.

    Every rank of the plan calls this with the same wires. `context` and `authorize` are for dialling. With `carry`
    each link, once it is up, is replaced by one of that kind.
    """
    until = time.monotonic() + deadline
    mine = [wire for wire in wires if rank in (wire.source, wire.target)]
    over = listener.expect(cluster, epoch, [wire for wire in mine if wire.target == rank])
    links: dict[Wire, Link] = {}

    def dial(wire: Wire) -> None:
        left = max(until - time.monotonic(), 0.0)
        hello = LinkHello(cluster, epoch, *wire)
        links[wire] = connect(addresses[wire.target], context, hello, left, authorize, over)

    try:
        _dial_all([wire for wire in mine if wire.source == rank], dial, over)
        for wire in mine:
            if wire.target == rank:
                links[wire] = listener.take(wire, max(until - time.monotonic(), 0.0), over)
        if carry is not None:
            _carry_all(carry, links, LinkHello(cluster, epoch, rank, rank), addresses, until)
    except TllmError:
        for link in links.values():
            link.interrupt()
            with contextlib.suppress(LinkError):  # it ends with what is raised here
                link.close()
        raise
    return links


def _carry_all(
    carry: Carry, links: dict[Wire, Link], here: LinkHello, addresses: Mapping[int, Address], until: float
) -> None:
    """Replace each link by one of another kind: all at once, since each waits for the rank at its other end."""
    host = addresses[here.source][0]

    def replace(wire: Wire) -> None:
        hello, left = LinkHello(here.cluster, here.epoch, *wire), max(until - time.monotonic(), 0.001)
        if wire.source == here.source:
            links[wire] = carry.source(links[wire], hello, host, left)
        else:
            links[wire] = carry.target(links[wire], hello, addresses[wire.source][0], host, left)

    with ThreadPoolExecutor(max(len(links), 1), "link carry") as pool:
        for done in [pool.submit(replace, wire) for wire in list(links)]:
            done.result()


def _dial_all(wires: Sequence[Wire], dial: Callable[[Wire], None], given_up: threading.Event) -> None:
    """Dial several at once; the first that fails ends the others and is raised."""
    with ThreadPoolExecutor(DIALLERS, "link dial") as pool:
        dialled = [pool.submit(dial, wire) for wire in wires]
        done, _ = wait(dialled, return_when=FIRST_EXCEPTION)
        failures = [error for one in done if (error := one.exception()) is not None]
        if failures:
            given_up.set()
            pool.shutdown(cancel_futures=True)
            raise failures[0]


class _NotYet(Exception):
    """The other end may be ready in a moment."""


def _try(
    address: Address, context: ssl.SSLContext | None, hello: LinkHello, until: float, authorize: Authorize | None
) -> TcpLink:
    sock = _dial(address, hello, until)
    until = min(until, time.monotonic() + ANSWER_SECONDS)
    sock.settimeout(max(until - time.monotonic(), 0.001))
    welcomed = False
    try:
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname=address[0])
        if authorize is not None:
            authorize(hello, peer_certificate(sock))
        say(sock, hello, until)
        answer = hear(sock, LinkWelcome, until)
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


def _dial(address: Address, hello: LinkHello, until: float) -> socket.socket:
    try:
        sock = socket.create_connection(address, timeout=min(max(until - time.monotonic(), 0.001), DIAL_SECONDS))
    except (ConnectionRefusedError, TimeoutError) as error:
        raise _NotYet(str(error)) from error
    except OSError as error:
        raise LinkClosed(
            f"rank {hello.source} cannot reach {_name(hello, address)}: {error}", "see whether that address is right"
        ) from error
    tune(sock)
    return sock


def _distrusted(hello: LinkHello, address: Address, why: str) -> AuthError:
    logger.warning("%s and rank %d do not trust each other: %s", _name(hello, address), hello.source, why)
    return AuthError(
        f"{_name(hello, address)} and rank {hello.source} do not trust each other: {why}",
        "both nodes must have joined the same cluster, with or without TLS alike; its log says more",
    )


def _name(hello: LinkHello, address: Address) -> str:
    return f"rank {hello.target} at {address[0]}:{address[1]}"
