from __future__ import annotations

import ssl

from tests.support.faults.full_disk import no_room
from tests.support.process_state import open_files
from tllm.cluster.certificates import Authority
from tllm.cluster.tls import data_client, data_server, peer_name


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


def test_links_can_be_made_while_no_disk_takes_a_byte() -> None:
    authority = Authority.create()
    a, b = authority.identity("node-a"), authority.identity("node-b")
    with no_room():
        client, server = data_client(a), data_server(b)
    assert shake_hands(client, server) == ("node-b", "node-a")


def test_a_context_leaves_no_descriptor_open() -> None:
    identity = Authority.create().identity("node-a")
    before = open_files()
    data_client(identity)
    assert open_files() <= before, "what another test has left open may be closed meanwhile"
