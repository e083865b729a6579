"""What is left of a connection whose handshake fails before it begins."""

from __future__ import annotations

import gc
import select
import socket
import ssl
import struct

import pytest

from tllm.comm.links.handshake import start_tls

RESET_WHEN_CLOSED = struct.pack("ii", 1, 0)


def test_a_connection_that_was_reset_leaves_no_socket_behind() -> None:
    """One that is left unclosed fails the test by its ResourceWarning."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        there, _ = server.accept()
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_WHEN_CLOSED)
        there.close()
        reset = select.poll()
        reset.register(here, select.POLLERR)
        assert reset.poll(10_000)
        with pytest.raises(OSError, match="not connected"):
            start_tls(here, ssl.create_default_context(), "127.0.0.1")
    gc.collect()
