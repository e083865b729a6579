"""The handshake of a link: the source sends `LinkHello`, the target answers `LinkWelcome`; both within a deadline.

Each is msgpack in one frame of bytes, of epoch 0 and sequence 0.
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any, TypeVar

import msgspec

from tllm.comm.links import frame
from tllm.core.errors import FrameError, decoded
from tllm.spec.plan import Wire

HELLO_LIMIT = 1024  # bytes


class LinkHello(msgspec.Struct, frozen=True):
    """Which link a source that has dialled its target wants to open; `name` is that of the wire."""

    cluster: str
    epoch: int
    source: int
    target: int
    name: str = ""

    @property
    def wire(self) -> Wire:
        return Wire(self.source, self.target, self.name)


class LinkWelcome(msgspec.Struct, frozen=True):
    """The target's answer. `refused` is the reason, "" if welcome; `again` says that a later try may succeed."""

    refused: str = ""
    again: bool = False


LINK_HELLOS, LINK_WELCOMES = msgspec.msgpack.Decoder(LinkHello), msgspec.msgpack.Decoder(LinkWelcome)

Message = TypeVar("Message", bound=msgspec.Struct)


def send_message(sock: socket.socket, message: msgspec.Struct, until: float) -> None:
    """Send one handshake message before the monotonic time `until`; an OSError if it does not leave."""
    payload = msgspec.msgpack.encode(message)
    sock.settimeout(_left(until))
    sock.sendall(frame.seal(frame.bytes_prefix(len(payload), epoch=0) + frame.pack_sequence(0), payload))


def receive_message(sock: socket.socket, decoder: msgspec.msgpack.Decoder[Message], until: float) -> Message:
    """Receive one handshake message, of the decoder's type, before the monotonic time `until`.

    FrameError when anything else arrives, an OSError (TimeoutError, ConnectionError) when nothing does.
    """
    name, raw = decoder.type.__name__, _read(sock, frame.HEADER_SIZE, until)
    header = frame.parse(raw)
    if header.dtype is not None or header.length > HELLO_LIMIT or header.epoch or header.sequence:
        raise FrameError(f"{header} where at most {HELLO_LIMIT} bytes of {name} belong")
    payload = _read(sock, header.length, until)
    if not frame.is_sealed(raw, payload):
        raise FrameError(f"a {name} whose checksum is not that of its bytes")
    return decoded(payload, decoder)


def start_tls(sock: socket.socket, context: ssl.SSLContext, server_name: str | None = None) -> ssl.SSLSocket:
    """The socket after TLS's handshake: with the server of that name, or as the server. OSError, and SSLError of it.

    A connection that was reset already is refused here: `wrap_socket` would leave a socket of its own unclosed.
    """
    sock.getpeername()
    return context.wrap_socket(sock, server_side=server_name is None, server_hostname=server_name)


def peer_certificate(sock: socket.socket) -> dict[str, Any] | None:
    """The other end's verified certificate as `ssl` decodes it; None on a connection without TLS."""
    getpeercert = getattr(sock, "getpeercert", None)
    return getpeercert() if getpeercert else None


def _read(sock: socket.socket, size: int, until: float) -> bytearray:
    data = bytearray()
    while len(data) < size:
        sock.settimeout(_left(until))
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise ConnectionError("connection closed")
        data += chunk
    return data


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
