"""Opening control connections: TLS over asyncio streams, with what goes wrong said in words."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from tllm.cluster.channel import Channel, TimedReader
from tllm.core.disk import open_files
from tllm.core.errors import AuthError, ClusterError, ConfigError, TllmError

log = logging.getLogger("tllm.cluster")

HANDSHAKE_SECONDS = 3.0
BUFFER_BYTES = 256 * 1024

NODES_FILES = 8192
"""Descriptors for a process that serves nodes, where the system allows them: thousands of nodes keep connections."""

Address = tuple[str, int]
"""Host and port."""

NO_ADDRESS = (ValueError, OverflowError)
"""What the system's functions raise, beside OSError, for a host or a port that none can have; others may name such."""

SEE = (
    "see that the first machine's command runs, that this is its address in your network (--cluster-host there names "
    "another), and that no firewall is between"
)
"""What to do where nobody answers."""

REASONS = {
    "HTTP_REQUEST": "it speaks plain HTTP, not TLS",
    "UNEXPECTED_EOF_WHILE_READING": "it closed the connection during the handshake",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "RECORD_LAYER_FAILURE": "it does not speak TLS",
    "UNEXPECTED_MESSAGE": "it does not speak TLS",
    "PACKET_LENGTH_TOO_LONG": "it does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "it speaks a version of TLS older than 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the other end takes TLS 1.3 only",
    "TLSV1_ALERT_UNKNOWN_CA": "the other end does not know our certificate's authority",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the other end refused our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the other end says that our certificate has expired; see the clocks",
}
"""What ssl's reasons for a failed handshake mean."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free port. ConfigError when this address cannot be listened on."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server((str(address[0]), port), family=family, backlog=128)
    except (OSError, *NO_ADDRESS) as error:
        raise ConfigError(
            f"cannot listen on {format_address((host, port))}: {_why(error)}",
            "choose another port, or an address of this machine",
        ) from error
    listening.setblocking(False)
    return listening


async def serve_connections(
    listening: socket.socket, serve: Callable[[socket.socket, str], Coroutine[Any, Any, None]]
) -> NoReturn:
    """Accept connections for ever, and call `serve(socket, "HOST:PORT" of the other end)` for each in its own task.

    What `serve` raises ends this. Closes the listening socket at its end.
    """
    open_files(NODES_FILES)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    sock, address = await loop.sock_accept(listening)
                except OSError as error:  # out of file descriptors, or gone again already
                    log.warning("cannot take a connection: %s", error)
                    await asyncio.sleep(0.1)  # let some close
                    continue
                tasks.create_task(serve(sock, format_address(address[:2])))
    finally:
        listening.close()


async def accept_tls(sock: socket.socket, context: ssl.SSLContext, peer: str, accepts: Any, limit: int) -> Channel:
    """The server's side of an accepted connection. OSError (ssl's are such too) when the handshake fails."""
    loop = asyncio.get_running_loop()
    reader = TimedReader(BUFFER_BYTES, loop)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, sock, ssl=context, ssl_handshake_timeout=HANDSHAKE_SECONDS, ssl_shutdown_timeout=1.0
    )
    return Channel(reader, asyncio.StreamWriter(transport, protocol, reader, loop), peer, accepts, limit)


async def connect_tls(
    address: Address, context: ssl.SSLContext, name: str, accepts: Any, limit: int, seconds: float
) -> Channel:
    """Connect as a client; `name` must be on the server's certificate. AuthError if it is not, Unreachable if nobody
    answers, TurnedAway if who listens hangs up."""
    where = f"{name} at {format_address(address)}"
    loop = asyncio.get_running_loop()
    reader = TimedReader(BUFFER_BYTES, loop)
    protocol = asyncio.StreamReaderProtocol(reader)
    try:
        async with asyncio.timeout(seconds):
            transport, _ = await loop.create_connection(
                lambda: protocol, *address, ssl=context, server_hostname=name, ssl_shutdown_timeout=1.0
            )
    except TimeoutError as error:
        raise Unreachable(f"{where} did not answer within {seconds:g} s", SEE) from error
    except OSError as error:
        raise failure(where, error) from error
    except NO_ADDRESS as error:
        raise ClusterError(f"{where} is no address: {error}", "write HOST:PORT, as in 192.168.1.10:8476") from error
    return Channel(reader, asyncio.StreamWriter(transport, protocol, reader, loop), where, accepts, limit)


class Unreachable(ClusterError):
    """Nobody listens there, its name is not known, or nothing comes back."""


class TurnedAway(ClusterError):
    """Who listens there closed the connection before it was secure, as a coordinator does that has too many guests."""


def failure(where: str, error: OSError) -> TllmError:
    """What a client's failed connection means."""
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return TurnedAway(
            f"{where} closed the connection before it was secure",
            "it has too many guests, or is no coordinator: see its log",
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthError(
            f"the certificate of {where} was refused: {error.verify_message}",
            "see that the token is of this cluster and that the clocks of both machines are right",
        )
    if isinstance(error, ssl.SSLError):
        return AuthError(
            f"no secure connection to {where}: {reason_of(error)}", "see that a tllm coordinator listens there"
        )
    if isinstance(error, socket.gaierror):
        return Unreachable(
            f"cannot reach {where}: this machine does not know that name ({error.strerror})",
            "write the address instead, as in 192.168.1.10:8476",
        )
    return Unreachable(f"cannot reach {where}: {_why(error)}", SEE)


def _why(error: Exception) -> str:
    """What the system says, without the address that Python's libraries add to it."""
    if isinstance(error, OSError) and error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def reason_of(error: OSError) -> str:
    """What a failed handshake or a refused certificate means, for a log line."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not one of this cluster ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return REASONS.get(error.reason or "", f"TLS failed ({error.reason or error})")
    if isinstance(error, (TimeoutError, ConnectionAbortedError)):
        return f"no TLS handshake within {HANDSHAKE_SECONDS:g} s"
    return str(error) or "it closed the connection during the handshake"


def format_address(address: Address) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> Address:
    """Read HOST:PORT. ConfigError for anything else."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or "/" in host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} is not an address", "write HOST:PORT, as in 192.168.1.10:8476")
    return host, int(port)


def own_address(towards: Address) -> str:
    """The address by which this machine would reach `towards`, and so by which it can be reached from there."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, *NO_ADDRESS) as error:
        raise ConfigError(
            f"no way to {towards[0]} from this machine: {_why(error)}",
            "name an address that other machines can reach",
        ) from error


class AddressGone(ClusterError):
    """The address by which other nodes reach this one is not this machine's any more."""


def check_own(host: str) -> None:
    """AddressGone where this machine has not got that address now: its network is away, or gave it another one."""
    try:
        listen(host, 0).close()
    except ConfigError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRNOTAVAIL:
            raise AddressGone(
                f"other nodes knew this machine as {host}, which is not its address any more: run the `tllm join` line "
                "again that the first machine printed last"
            ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
