"""The link inside a process keeps the same promises as the one over TCP."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tllm.comm.links.link import LOCAL_DEPTH, LocalLink
from tllm.core.errors import FrameError, LinkClosed, LinkTimeout


def test_the_sender_may_overwrite_what_it_sent() -> None:
    link = LocalLink(0, 1)
    x = torch.ones(3)
    link.send(x)
    x.zero_()
    assert torch.equal(link.recv((3,), torch.float32), torch.ones(3))


def test_another_shape_dtype_or_kind_is_refused_and_closes() -> None:
    for wrong in (torch.ones(4), torch.ones(3).double(), b"bytes"):
        link = LocalLink(4, 5)
        if isinstance(wrong, bytes):
            link.send_bytes(wrong)
        else:
            link.send(wrong)
        with pytest.raises(FrameError, match=r"rank 4 sent rank 5 .*the plan says float32 \(3,\)"):
            link.recv((3,), torch.float32)
        with pytest.raises(LinkClosed):
            link.send(torch.ones(3))


def test_bytes_over_the_limit_are_refused() -> None:
    link = LocalLink(0, 1)
    link.send_bytes(b"12345")
    with pytest.raises(FrameError, match="5 bytes; the plan says up to 4 bytes"):
        link.recv_bytes(4)


def test_what_was_sent_before_close_still_arrives() -> None:
    link = LocalLink(0, 1)
    link.send_bytes(b"last")
    link.close()
    assert link.recv_bytes(10) == b"last"
    with pytest.raises(LinkClosed, match="rank 0 went away"):
        link.recv_bytes(10)


def test_close_ends_a_receive_that_waits() -> None:
    link = LocalLink(0, 1, deadline=50)
    threading.Timer(0.1, link.close).start()
    start = time.monotonic()
    with pytest.raises(LinkClosed):
        link.recv_bytes(10)
    assert time.monotonic() - start < 20


def test_a_full_link_names_the_rank_that_does_not_take() -> None:
    link = LocalLink(0, 1, deadline=0.1)
    for _ in range(LOCAL_DEPTH):
        link.send_bytes(b"")
    with pytest.raises(LinkTimeout, match="rank 1 did not take what rank 0 sent"):
        link.send_bytes(b"")


def test_an_unbounded_link_takes_more() -> None:
    link = LocalLink(0, 1, deadline=0.1)
    link.unbounded()
    for number in range(2 * LOCAL_DEPTH):
        link.send_bytes(bytes([number]))
    assert [link.recv_bytes(1)[0] for _ in range(2 * LOCAL_DEPTH)] == list(range(2 * LOCAL_DEPTH))


def test_wait_tells_without_harm() -> None:
    link = LocalLink(0, 1)
    assert not link.wait(0.01)
    link.send_bytes(b"x")
    assert link.wait(20)
    assert link.recv_bytes(1) == b"x"
