"""Who is who: the cluster's own certificate authority, made on first use, and the certificates that it signs."""

from __future__ import annotations

import datetime
import hashlib
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tllm.core.disk import check_private, private_file
from tllm.core.errors import AuthError

COORDINATOR = "coordinator"
"""The name on the coordinator's certificate; no node can have it."""

NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
SKEW = datetime.timedelta(days=3650)
"""How far a node's clock may be behind the coordinator's: far, as on a board that kept no time while it was off. It
costs nothing, as whoever has a node's key also has that node's clock.
"""
VALIDITY = datetime.timedelta(days=3650)
"""Of the authority and of a node. A node's key never leaves the memory of its process, and the next one that joins by
its name has another, so an early end would protect little. It would end clusters: no certificate is renewed.
"""
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # FIPS 186-5
UNREADABLE_PEM = (ValueError, UnsupportedAlgorithm, x509.InvalidVersion)
"""What `cryptography` raises for a certificate or a request that is none, or is of a kind that it does not know."""

KEY_FILE, CERTIFICATE_FILE = "authority.key", "authority.pem"


@dataclass(frozen=True)
class Identity:
    """One holder of a certificate: its name, certificate and key, and the authority it trusts; all PEM."""

    name: str
    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes


class Authority:
    """The cluster's certificate authority: a P-256 key that signs one certificate for each node."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate

    @classmethod
    def create(cls) -> Authority:
        """A new authority, in memory only."""
        return cls._of_key(ec.generate_private_key(ec.SECP256R1()))

    @classmethod
    def of_secret(cls, secret: bytes) -> Authority:
        """The authority that whoever knows the secret can be: the same key each time, certificates that all trust.

        A certificate shows the key, and so lets anyone try secrets at leisure: it must be one that cannot be guessed.
        """
        # 48 bytes: 128 bits more than the order, so that each key is as likely as any other (FIPS 186-5, A.2.1).
        number = int.from_bytes(HKDF(hashes.SHA256(), 48, None, b"tllm authority of a secret").derive(secret))
        return cls._of(ec.derive_private_key(number % (P256_ORDER - 1) + 1, ec.SECP256R1()), "tllm secret")

    @classmethod
    def _of_key(cls, key: ec.EllipticCurvePrivateKey) -> Authority:
        """By a name that follows from the key: what one of its certificates vouches for, another of them does too."""
        return cls._of(key, f"tllm cluster {_digest_of(key.public_key()).hex()[:8]}")

    @classmethod
    def _of(cls, key: ec.EllipticCurvePrivateKey, common_name: str) -> Authority:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        certificate = (
            _builder(name, name, key.public_key(), _now())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(authority=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """The authority kept in `folder`, made there on first use; its key is readable by its owner only."""
        key_path, certificate_path = folder / KEY_FILE, folder / CERTIFICATE_FILE
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not key_path.exists() and _write_once(key_path, _key_pem(ec.generate_private_key(ec.SECP256R1()))):
                certificate_path.unlink(missing_ok=True)
            check_private(key_path)
            key = key_path.read_bytes()
            try:
                if not certificate_path.exists():
                    _write_once(certificate_path, cls._of_key(_loaded(key)).pem)
                return cls.restore(certificate_path.read_bytes(), key)
            except AuthError as error:
                raise AuthError(f"{folder}: {error.message}", "move the folder away to begin anew") from error
        except OSError as error:
            raise AuthError(f"{folder} cannot keep the cluster's authority: {error}", "give another folder") from error

    @classmethod
    def restore(cls, certificate: bytes, key: bytes) -> Authority:
        """The authority of a certificate and its private key, both PEM. AuthError where they do not belong together."""
        private = _loaded(key)
        try:
            public = x509.load_pem_x509_certificate(certificate)
        except ValueError as error:
            raise AuthError(f"the cluster's authority cannot be read: {error}") from error
        if private.public_key() != public.public_key():
            raise AuthError("the key and the certificate of the cluster's authority do not match")
        return cls(private, public)

    @property
    def key_pem(self) -> bytes:
        """The private key. Whoever has it can let anybody into the cluster."""
        return _key_pem(self._key)

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def fingerprint(self) -> bytes:
        """Of its key, as RFC 7469 pins one: so that an authority of a secret has the same in every process."""
        return _digest_of(self._key.public_key())

    @property
    def cluster(self) -> str:
        """A short name of the cluster, from the fingerprint."""
        return self.fingerprint.hex()[:16]

    def sign(self, request: bytes, name: str, now: datetime.datetime | None = None) -> bytes:
        """A certificate (PEM) for the key of a signing request, in the name that we give it. AuthError if it is bad.

        Whatever the request asks for beside its key is ignored.
        """
        try:
            csr = x509.load_pem_x509_csr(request)
            sound = csr.is_signature_valid
            key = csr.public_key()
        except UNREADABLE_PEM as error:
            raise AuthError(f"the signing request of {name} cannot be read: {error}") from error
        if not sound or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise AuthError(f"the signing request of {name} is not one of a P-256 key that its sender holds")
        # Either end of a data wire may be the one that connects, so each certificate serves for both ends.
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(subject, self._certificate.subject, key, now or _now())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(both, critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def identity(self, name: str) -> Identity:
        """A key and a certificate made here, for the coordinator itself."""
        key, request = make_request(name)
        return Identity(name, self.sign(request, name), key, self.pem)


def make_request(name: str) -> tuple[bytes, bytes]:
    """A new P-256 key and a signing request for it, both PEM. The key never leaves the node that made it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return _key_pem(key), csr.public_bytes(serialization.Encoding.PEM)


def fingerprint_of(certificate: bytes) -> bytes:
    """SHA-256 of the public key in a PEM certificate. AuthError when it is none of an authority of ours."""
    return _digest_of(_offered(certificate)[1])


def first_certificate(offered: bytes) -> bytes:
    """The first certificate (PEM) of what somebody offers as that of its authority. AuthError when it is none.

    Only that one may be trusted once its fingerprint is found to be right: OpenSSL would trust all that stand there.
    """
    return _offered(offered)[0].public_bytes(serialization.Encoding.PEM)


def check_name(name: str) -> None:
    """AuthError unless a node may have this name: a lower-case DNS label that is not the coordinator's."""
    if not NODE_NAME.fullmatch(name) or name == COORDINATOR:
        raise AuthError(
            f"{name[:80]!r} cannot be the name of a node", "use up to 63 small letters, digits and dashes, as in node-2"
        )


def node_name(host: str) -> str:
    """A name for a new node of this host, unlike any other's."""
    label = re.sub(r"[^a-z0-9]+", "-", host.lower().partition(".")[0]).strip("-")[:50].strip("-")
    return f"{label or 'node'}-{secrets.token_hex(3)}"


def _loaded(key: bytes) -> ec.EllipticCurvePrivateKey:
    """The authority's private key. AuthError for what is none."""
    try:
        private = serialization.load_pem_private_key(key, None)
    except ValueError as error:
        raise AuthError(f"the key of the cluster's authority cannot be read: {error}") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise AuthError("the key of the cluster's authority is of another kind than ours")
    return private


def _offered(certificate: bytes) -> tuple[x509.Certificate, ec.EllipticCurvePublicKey]:
    """A certificate in PEM from who knows whom, and its key."""
    try:
        found = x509.load_pem_x509_certificate(certificate)
        key = found.public_key()
    except UNREADABLE_PEM as error:
        raise AuthError(f"what was offered as the cluster's certificate cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise AuthError("what was offered as the cluster's certificate is of another kind than ours")
    return found, key


def _digest_of(key: ec.EllipticCurvePublicKey) -> bytes:
    return hashlib.sha256(
        key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    ).digest()


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + VALIDITY)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_once(path: Path, content: bytes) -> bool:
    """A file that only its owner can read, whole and on the disk; whether no other process has just made it."""
    try:
        with private_file(path, replaces=False) as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
