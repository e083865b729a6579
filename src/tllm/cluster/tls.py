"""TLS contexts of both wires: TLS 1.3 only, certificates of this cluster's authority only, nothing resumed."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator

from tllm.cluster.certificates import Identity


def control_server(identity: Identity) -> ssl.SSLContext:
    """For the control port: a certificate is not demanded, so that a node without one can ask to join."""
    context = _server(identity)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


def data_server(identity: Identity) -> ssl.SSLContext:
    """For a node's data port: nobody without a certificate of this cluster."""
    context = _server(identity)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def member_client(identity: Identity) -> ssl.SSLContext:
    """For connecting to the control port as a member; the name given as `server_hostname` is checked."""
    context = guest_client(identity.authority)
    _load(context, identity)
    return context


def data_client(identity: Identity) -> ssl.SSLContext:
    """For dialling a node's data port by its address; hold the name on its certificate against the plan afterwards."""
    context = member_client(identity)
    context.check_hostname = False
    return context


def guest_client(authority: bytes) -> ssl.SSLContext:
    """For connecting without a certificate to a server whose authority (PEM) is known."""
    context = _client()
    context.load_verify_locations(cadata=authority.decode("ascii"))
    return context


def unverified_client() -> ssl.SSLContext:
    """For reading the authority's certificate, which is then held against a join token; nothing secret may be sent."""
    context = _client()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def peer_name(connection: ssl.SSLSocket | ssl.SSLObject) -> str | None:
    """The name on the verified certificate of the other end; None when it showed none."""
    certificate = connection.getpeercert()
    if not certificate:
        return None
    names = certificate.get("subjectAltName", ())
    assert isinstance(names, tuple) and len(names) == 1, "our authority signs exactly one name"
    return str(names[0][1])


def _client() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _server(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # every connection proves itself anew
    context.load_verify_locations(cadata=identity.authority.decode("ascii"))
    _load(context, identity)
    return context


def _load(context: ssl.SSLContext, identity: Identity) -> None:
    """The ssl module reads keys from files only. Pipes are files too: no key touches a disk, and one that is full is in
    no new link's way."""
    with _piped(identity.certificate) as certificate, _piped(identity.key) as key:
        context.load_cert_chain(certificate, key)


@contextlib.contextmanager
def _piped(content: bytes) -> Iterator[str]:
    """A path at which content that fits into a pipe can be read once, by this process."""
    end, beginning = os.pipe()
    try:
        with open(beginning, "wb", buffering=0) as pipe:
            os.set_blocking(beginning, False)
            assert pipe.write(content) == len(content), f"{len(content)} bytes are more than a pipe takes"
        yield f"/dev/fd/{end}"
    finally:
        os.close(end)
