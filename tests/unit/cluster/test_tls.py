from __future__ import annotations

import os
import resource
import ssl
from collections.abc import Iterator

import pytest

from tllm.cluster.certificates import Authority
from tllm.cluster.tls import data_client, data_server, peer_name


@pytest.fixture
def no_room() -> Iterator[None]:
    """No byte of a file can be written by this process, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[str | None, str | None]:
    """The names that each end has seen of the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    waiting = list(ends)
    for _ in range(4):
        for end in tuple(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                pass
    assert not waiting, "the handshake ends"
    return peer_name(ends[0]), peer_name(ends[1])


@pytest.mark.usefixtures("no_room")
def test_links_can_be_made_while_no_disk_takes_a_byte() -> None:
    authority = Authority.create()
    a, b = authority.identity("node-a"), authority.identity("node-b")
    assert shake_hands(data_client(a), data_server(b)) == ("node-b", "node-a")


def test_a_context_leaves_no_descriptor_open() -> None:
    identity = Authority.create().identity("node-a")
    before = os.listdir("/proc/self/fd")
    data_client(identity)
    assert len(os.listdir("/proc/self/fd")) == len(before)
