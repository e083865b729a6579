"""Sends and receives whose link opens at the moment when all links end."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch

from tllm.comm.c10d.point_to_point import PointToPoint
from tllm.comm.links.link import Link
from tllm.comm.links.tcp_link import TcpLink
from tllm.core.errors import LinkError
from tllm.spec.plan import Wire


class LateLinks:
    """Links of rank 0, of which one opens just after all were to end."""

    rank, links = 0, dict[Wire, Link]()

    def __init__(self, sock: socket.socket) -> None:
        self.begun = threading.Event()
        self._sock = sock

    def name_of(self, tag: int) -> str:
        return f"tag {tag}"

    def expect(self, wire: Wire) -> None:
        self.begun.clear()

    def accept(self, wire: Wire, cancelled: threading.Event) -> Link:
        self.begun.set()
        assert cancelled.wait(20)
        time.sleep(0.05)
        return TcpLink(self._sock, wire.source, wire.target, deadline=60)


@pytest.mark.parametrize("end", ["close", "interrupt"])
def test_a_link_that_opens_when_all_end_is_ended_too(end: str) -> None:
    """Else a receive on it, and `close` with it, waits for its deadline: half an hour with torch's default."""
    ours, theirs = socket.socketpair()
    links = LateLinks(ours)
    messages = PointToPoint(links)  # type: ignore[arg-type]
    received = messages.recv(1, torch.empty(1), 7)
    assert links.begun.wait(20)
    start = time.monotonic()
    getattr(messages, end)()
    with pytest.raises(LinkError):
        received.wait(20)
    messages.close()
    assert time.monotonic() - start < 20 and theirs.recv(1) == b""
    theirs.close()
