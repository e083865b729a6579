"""What keeps the bytes of a link over TLS: the tag of each record, in place of a checksum of the payload."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest
import torch

from tests.support.comm.ranks import make_contexts
from tllm.comm.links import frame
from tllm.comm.links.connect import connect
from tllm.comm.links.handshake import LinkHello
from tllm.comm.links.listener import Listener
from tllm.comm.links.send_buffer import shut
from tllm.comm.links.tcp_link import TcpLink
from tllm.core.errors import FrameError, LinkClosed, LinkError
from tllm.spec.plan import Wire

LONG = frame.PIECE_BYTES + 40_000
WIRE = Wire(3, 8)


class Tamperer:
    """Stands between source and target, passes on what each says, and inverts one bit of what the source says."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.at: int | None = None  # of the source's bytes from now on, the one whose bit it inverts
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """Wait until both ends are gone."""
        self._thread.join(30)

    def _run(self) -> None:
        with self._server, self._server.accept()[0] as source, socket.create_connection(self._target) as target:
            answers = threading.Thread(target=self._pass_on, args=(target, source, False))
            answers.start()
            self._pass_on(source, target, True)
            answers.join()

    def _pass_on(self, ours: socket.socket, theirs: socket.socket, tampers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(ours.recv(65536)):
                if tampers and self.at is not None:
                    if self.at < len(data):
                        data[self.at] ^= 1
                    self.at -= len(data)
                    self.at = self.at if self.at >= 0 else None
                theirs.sendall(data)
        for sock in (ours, theirs):
            shut(sock)


@pytest.mark.parametrize("at", [3, 70, 20_000, LONG])
def test_a_bit_that_was_changed_on_the_way_ends_the_link(at: int, tmp_path: Path) -> None:
    server, client = make_contexts(tmp_path)
    listener = Listener("127.0.0.1", 0, server)
    listener.expect("test", 5, [WIRE])
    with contextlib.closing(Tamperer(listener.address)) as between:
        source = connect(between.address, client, LinkHello("test", 5, *WIRE))
        target = listener.accept(WIRE, 30)
        listener.close()
        x = torch.arange(LONG, dtype=torch.int64).to(torch.uint8)
        source.send(x)
        assert torch.equal(target.recv((LONG,), torch.uint8), x), "as long as nobody changes anything, it arrives"
        between.at = at
        source.send(x)
        with pytest.raises(LinkClosed, match="rank 3"):
            target.recv((LONG,), torch.uint8)
        source.interrupt()
        with contextlib.suppress(LinkError):
            source.close()


def test_only_plain_connections_sum_up_their_payloads(tmp_path: Path) -> None:
    """The same frame with a checksum of its header alone is refused where nothing else would notice a changed byte."""
    head = frame.tensor_prefix((3,), torch.uint8, 5) + frame.pack_sequence(0)
    ours, theirs = socket.socketpair()
    target = TcpLink(ours, *WIRE[:2], epoch=5, deadline=5)
    theirs.sendall(frame.seal_header(head, b"") + b"\1\2\3")
    with pytest.raises(FrameError, match="checksum"):
        target.recv((3,), torch.uint8)
    theirs.close()
