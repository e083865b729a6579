from __future__ import annotations

import asyncio
import errno
import os
import socket

import pytest

from tllm.node.coordinator.membership import ProbeResult, why_silent


def test_a_process_that_ended_is_told_from_one_that_is_stopped() -> None:
    """A socket that listens and accepts nothing is all that is left of a process which is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        address = stopped.getsockname()
        found = asyncio.run(why_silent(address))
        assert "its process does not" in found.why and found.is_there
    assert asyncio.run(why_silent(address)) == ProbeResult("its process has ended", False)


def test_a_machine_that_does_not_answer_is_said_to_in_time() -> None:
    """A full backlog drops further connections without a word, as a cut cable does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        with socket.create_connection(address):
            found = asyncio.run(why_silent(address, 0.2))
            assert "nothing answers at 127.0.0.1:" in found.why and not found.is_there


def test_what_this_machine_lacks_is_no_others_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator without a descriptor left cannot ask, and loses nobody for that."""

    def none_left(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(asyncio, "open_connection", none_left)
    found = asyncio.run(why_silent(("127.0.0.1", 1)))
    assert found.is_there and "cannot be asked (Too many open files on the coordinator's)" in found.why


@pytest.mark.parametrize("address", [("a..b", 1), ("127.0.0.1", 70_000)])
def test_an_address_that_is_none_ends_its_node_alone(address: tuple[str, int]) -> None:
    assert not asyncio.run(why_silent(address)).is_there
