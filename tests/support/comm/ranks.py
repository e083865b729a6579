"""Ranks as threads of the test's process, over links inside it or over loopback."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tllm.cluster.certificates import Authority, Identity
from tllm.cluster.settings import LinkKind, Wiring
from tllm.cluster.tls import data_client, data_server
from tllm.comm.collectives.group import Group
from tllm.comm.links.connect import LinkOptions, Listener, open_links, transport_for
from tllm.comm.links.link import Link
from tllm.spec.plan import Wire

T = TypeVar("T")
Contexts = tuple[ssl.SSLContext, ssl.SSLContext]  # for listening, for dialling


def run_ranks(groups: Sequence[Group], work: Callable[[Group], T]) -> list[T]:
    """`work` on every rank at once; what it returns, by rank. The first error of the lowest rank is raised."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


def all_pairs(size: int) -> list[Wire]:
    return [Wire(a, b) for a in range(size) for b in range(size) if a != b]


def group_of(rank: int, size: int, links: dict[Wire, Link]) -> Group:
    send = {b: link for (a, b, _), link in links.items() if a == rank}
    recv = {a: link for (a, b, _), link in links.items() if b == rank}
    return Group(rank, size, send, recv)


def join_group(
    rank: int, listener: Listener, addresses: dict[int, tuple[str, int]], contexts: Contexts | None, deadline: float
) -> Group:
    """This rank's group over TCP with every rank in `addresses`; closes the listener."""
    size = len(addresses)
    dialling = contexts[1] if contexts else None
    options = LinkOptions(context=dialling, deadline=20.0)
    links = open_links(rank, addresses, listener, all_pairs(size), cluster="test", epoch=1, options=options)
    listener.close()
    group = group_of(rank, size, links)
    group.set_deadline(deadline)
    return group


def tcp_groups(size: int, contexts: Contexts | None = None, deadline: float = 20.0) -> list[Group]:
    """One group for each rank, all in this process, over loopback."""
    listeners = [Listener("127.0.0.1", 0, contexts[0] if contexts else None) for _ in range(size)]
    addresses = {rank: listener.address for rank, listener in enumerate(listeners)}
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda r: join_group(r, listeners[r], addresses, contexts, deadline), range(size)))


def transport_links(
    kind: LinkKind, ranks: Sequence[int], epoch: int = 1, identities: Sequence[Identity] | None = None
) -> list[dict[Wire, Link]]:
    """Links of a kind, over loopback, from each of these ranks to each other; by place in `ranks`, all in this process.

    Without `identities` all are of one authority.
    """
    authority = Authority.create()
    ids = identities or [authority.identity(f"node-{rank}") for rank in ranks]
    listeners = [Listener("127.0.0.1", 0, data_server(one)) for one in ids]
    addresses = {rank: listener.address for rank, listener in zip(ranks, listeners, strict=True)}
    wires = [Wire(a, b) for a in ranks for b in ranks if a != b]

    def opened(place: int) -> dict[Wire, Link]:
        transport = transport_for(Wiring(kind), ids[place], ["127.0.0.1"])
        options = LinkOptions(context=data_client(ids[place]), deadline=20, transport=transport)
        return open_links(
            ranks[place], addresses, listeners[place], wires, cluster="test", epoch=epoch, options=options
        )

    try:
        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(opened, range(len(ranks))))
    finally:
        for listener in listeners:
            listener.close()


def transport_groups(kind: LinkKind, size: int) -> list[Group]:
    """One group for each rank, all in this process, over links of a kind."""
    return [group_of(rank, size, links) for rank, links in enumerate(transport_links(kind, range(size)))]


def make_contexts(folder: Path, name: str = "node") -> Contexts:
    """Mutual TLS 1.3 by a certificate authority made for this call."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_certificates(folder, name)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(folder / "node.pem")
        context.load_verify_locations(folder / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
    server.num_tickets = 0
    return server, client


def _write_certificates(folder: Path, name: str) -> None:
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test CA")])

    def sign(subject: x509.Name, public: ec.EllipticCurvePublicKey, extension: x509.ExtensionType) -> x509.Certificate:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
        builder = builder.serial_number(x509.random_serial_number()).add_extension(extension, critical=False)
        builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        return builder.sign(ca_key, hashes.SHA256())

    here = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    ca = sign(issuer, ca_key.public_key(), x509.BasicConstraints(ca=True, path_length=0))
    node = sign(subject, key.public_key(), x509.SubjectAlternativeName(here))
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "ca.pem").write_bytes(ca.public_bytes(pem))
    (folder / "node.pem").write_bytes(node.public_bytes(pem) + secret)
