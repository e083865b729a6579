"""`TcpLink`: a link between two processes, over one connection of its own, plain or TLS."""

from __future__ import annotations

import socket

from tllm.comm.links.framed_link import FramedLink
from tllm.comm.links.link import DEADLINE
from tllm.comm.links.receive_buffer import ReceiveBuffer
from tllm.comm.links.send_buffer import SendBuffer


class TcpLink(FramedLink):
    """One end of a connection that carries frames in one direction only.

    (Python's TLS sockets are not safe to read in one thread while another writes.)
    """

    def __init__(
        self, sock: socket.socket, source: int, target: int, epoch: int = 0, deadline: float = DEADLINE
    ) -> None:
        outbox = SendBuffer(sock, source, target, deadline)
        super().__init__(outbox, ReceiveBuffer(sock), source, target, epoch, deadline)


def tune(sock: socket.socket) -> None:
    """Small frames leave at once, and a peer that lost its power is noticed within a minute even on an idle link."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
