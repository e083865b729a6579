from __future__ import annotations

import datetime
import errno
import os
import ssl
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tllm.cluster.certificates import Authority, check_name, fingerprint_of, make_request, node_name
from tllm.core.errors import AuthError


def test_a_certificate_has_the_name_that_the_authority_gives_not_the_one_asked_for() -> None:
    authority = Authority.create()
    _, request = make_request("coordinator")
    certificate = x509.load_pem_x509_certificate(authority.sign(request, "node-1"))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["node-1"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.pem))


def test_a_certificate_outlives_long_runs_and_clocks_that_are_years_off() -> None:
    authority = Authority.create()
    now = datetime.datetime.now(datetime.UTC)
    certificate = x509.load_pem_x509_certificate(authority.sign(make_request("n")[1], "n", now))
    behind = now - datetime.timedelta(days=3000)
    assert certificate.not_valid_before_utc <= behind
    assert x509.load_pem_x509_certificate(authority.pem).not_valid_before_utc <= behind
    ahead = now + datetime.timedelta(days=3000)
    assert ahead <= certificate.not_valid_after_utc <= now + datetime.timedelta(days=3651)


def test_the_authority_is_made_once_and_its_key_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    first = Authority.open(folder)
    again = Authority.open(folder)
    assert again.fingerprint == first.fingerprint == fingerprint_of(first.pem)
    assert stat.S_IMODE((folder / "authority.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("has_links", [True, False])
def test_of_two_processes_that_make_it_at_once_both_have_the_same(
    has_links: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The later one's files would make the earlier one's cluster one that nobody finds again."""

    def link(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")  # as on a disk with FAT

    if not has_links:
        monkeypatch.setattr(os, "link", link)
    begins = threading.Barrier(8)

    def opened(_: int) -> Authority:
        begins.wait(20)
        return Authority.open(tmp_path)

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(opened, range(8)))
    (tmp_path / "authority.pem").unlink()
    again = Authority.open(tmp_path)  # as after a loss of power between the two files
    assert {one.fingerprint for one in made} == {again.fingerprint}
    certificate = x509.load_pem_x509_certificate(made[0].sign(make_request("n")[1], "n"))
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(again.pem))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["authority.key", "authority.pem"]


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    Authority.open(tmp_path)
    (tmp_path / "authority.key").chmod(0o644)
    with pytest.raises(AuthError, match="read by others"):
        Authority.open(tmp_path)


def test_a_key_of_another_authority_is_refused(tmp_path: Path) -> None:
    Authority.open(tmp_path / "a")
    Authority.open(tmp_path / "b")
    (tmp_path / "a" / "authority.pem").write_bytes((tmp_path / "b" / "authority.pem").read_bytes())
    with pytest.raises(AuthError, match="do not match"):
        Authority.open(tmp_path / "a")


def test_a_request_is_signed_only_for_a_p256_key_that_its_sender_holds() -> None:
    authority = Authority.create()
    subject = x509.Name([])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    others = [rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())]
    for key in others:
        request = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        with pytest.raises(AuthError, match="P-256"):
            authority.sign(request, "n")
    forged = bytearray(x509.load_pem_x509_csr(make_request("n")[1]).public_bytes(serialization.Encoding.DER))
    forged[-1] ^= 1
    try:
        pem = x509.load_der_x509_csr(bytes(forged)).public_bytes(serialization.Encoding.PEM)
    except ValueError:
        pem = b"no longer a request"
    with pytest.raises(AuthError):
        authority.sign(pem, "n")


P256 = bytes.fromhex("06082a8648ce3d030107")  # the curve's name in DER
UNKNOWN_CURVE = P256[:-1] + b"\2"


def test_what_nobody_here_can_read_is_refused_and_ends_nothing_else() -> None:
    """`cryptography` has errors of its own for keys and versions that it does not know: no ValueErrors."""
    request = x509.load_pem_x509_csr(make_request("n")[1]).public_bytes(serialization.Encoding.DER)
    for changed in (request.replace(P256, UNKNOWN_CURVE), request.replace(b"\2\1\0", b"\2\1\5", 1)):
        assert changed != request
        pem = ssl.DER_cert_to_PEM_cert(changed).replace("CERTIFICATE", "CERTIFICATE REQUEST")
        with pytest.raises(AuthError, match="the signing request of n cannot be read"):
            Authority.create().sign(pem.encode(), "n")
    certificate = ssl.PEM_cert_to_DER_cert(Authority.create().pem.decode())
    unknown = ssl.DER_cert_to_PEM_cert(certificate.replace(P256, UNKNOWN_CURVE)).encode()
    with pytest.raises(AuthError, match="cannot be read"):
        fingerprint_of(unknown)
    key, name, now = rsa.generate_private_key(65537, 2048), x509.Name([]), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(1))
    with pytest.raises(AuthError, match="of another kind than ours"):
        fingerprint_of(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


@pytest.mark.parametrize("name", ["coordinator", "", "-a", "A", "a.b", "a" * 64, "a b", "ä"])
def test_names_that_no_node_can_have(name: str) -> None:
    with pytest.raises(AuthError):
        check_name(name)


@pytest.mark.parametrize("host", ["box", "My_Laptop.local", "", "-", "x" * 200, "10.0.0.1", "coordinator"])
def test_a_name_made_from_any_host_can_be_had(host: str) -> None:
    name = node_name(host)
    check_name(name)
    assert name != node_name(host)
