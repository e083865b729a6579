"""Sends that their caller pushes, when their link ends meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

import pytest
import torch

from tllm.comm.links.tcp_link import TcpLink, push_all
from tllm.core.errors import LinkClosed


@pytest.mark.parametrize("receives", [False, True])
def test_a_send_whose_link_another_thread_has_closed_says_so(receives: bool) -> None:
    """As a group does that closes while a collective of its own thread is under way."""
    ours, theirs = socket.socketpair()
    back, _ = pair = socket.socketpair()
    link, other = TcpLink(ours, 0, 1), TcpLink(back, 1, 0, deadline=5.0)
    pending = link.start_send(torch.zeros(1 << 22))
    assert pending is not None
    receive = partial(other.recv, (1,), torch.float32, pending_sends=[pending])
    push: Callable[[], object] = receive if receives else partial(push_all, [pending])
    link.close()
    with pytest.raises(LinkClosed, match="from rank 0 to rank 1 was closed on this side"):
        push()
    for sock in (theirs, *pair):
        sock.close()
