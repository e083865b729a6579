"""The cipher of a connection: OpenSSL's first, or what one end's settings allow, as docs/concepts/security.md says."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tllm.cluster.certificates import Authority, Identity
from tllm.cluster.tls import data_client, data_server

ROOT = Path(__file__).parents[3]
HERE = "127.0.0.1"
DIAL = """
import socket, sys
from pathlib import Path
import msgspec
from tllm.cluster.certificates import Identity
from tllm.cluster.tls import data_client, data_server
identity = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Identity)
with socket.create_connection(("127.0.0.1", int(sys.argv[2]))) as plain:
    if sys.argv[3] == "client":
        sock = data_client(identity).wrap_socket(plain, server_hostname="127.0.0.1")
    else:  # who dials may be the server of TLS: only the settings of each end are looked at here
        sock = data_server(identity).wrap_socket(plain, server_side=True)
    with sock:
        sock.recv(1)
"""


@pytest.mark.parametrize("role", ["client", "server"])
def test_a_machine_that_allows_one_cipher_gets_it_from_all_others(role: str, tmp_path: Path) -> None:
    """Our own end, in this process, has OpenSSL's own settings."""
    page = (ROOT / "docs" / "concepts" / "security.md").read_text()
    found = re.search(r"```text\n(openssl_conf.*?)```", page, re.DOTALL)
    assert found is not None, "the page tells users what to write"
    settings, file = tmp_path / "openssl.cnf", tmp_path / "identity.json"
    settings.write_text(found[1])
    identity = Authority.create().identity("node")
    file.touch(mode=0o600)
    file.write_bytes(msgspec.json.encode(identity))
    usual, limited = cipher_with(file, role, {}), cipher_with(file, role, {"OPENSSL_CONF": str(settings)})
    assert usual != limited == "TLS_CHACHA20_POLY1305_SHA256"


def cipher_with(file: Path, role: str, variables: dict[str, str]) -> str:
    """The cipher of a connection to a process with these variables, which has this role of TLS."""
    identity = msgspec.json.decode(file.read_bytes(), type=Identity)
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server((HERE, 0)))
        listening.settimeout(100)
        words = [sys.executable, "-c", DIAL, str(file), str(listening.getsockname()[1]), role]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
        child = stack.enter_context(subprocess.Popen(words, env=environment))
        plain = stack.enter_context(listening.accept()[0])
        sock = stack.enter_context(ours(plain, role, data_server(identity), data_client(identity)))
        cipher = sock.cipher()
        sock.sendall(b"x")
        assert child.wait(100) == 0 and cipher is not None
        return cipher[0]


def ours(plain: socket.socket, role: str, server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLSocket:
    if role == "client":
        return server.wrap_socket(plain, server_side=True)
    return client.wrap_socket(plain, server_hostname=HERE)
