"""Join tokens: what an operator carries to a new node, and the coordinator's book of those that are still good."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Meta

from tllm.cluster.certificates import Authority
from tllm.core.errors import AuthError

PREFIX = "tllm1-"
SECRET_SIZE = 32
FINGERPRINT_SIZE = 32
LENGTH = len(PREFIX) + (SECRET_SIZE + FINGERPRINT_SIZE) * 4 // 3 + 1
HOUR = 3600.0
ALWAYS_SECONDS, ALWAYS_USES = 10 * 365 * 24 * HOUR, 1 << 40


LAST = "that the first machine printed last"


class StaleToken(AuthError):
    """A join token that was good, and is not any more."""


@dataclass(frozen=True)
class JoinToken:
    """A secret that lets a node in, and the fingerprint by which it knows that it has found the right cluster."""

    secret: bytes = field(repr=False)
    fingerprint: bytes

    def __str__(self) -> str:
        """The form in which it is carried; it is a secret, so it goes to no log and no command line of ours."""
        return PREFIX + base64.urlsafe_b64encode(self.secret + self.fingerprint).rstrip(b"=").decode()

    @classmethod
    def of_secret(cls, secret: bytes) -> JoinToken:
        """The token of those who share a secret: of the authority that is made from it, and good while the cluster is.

        Whoever has the token cannot find the secret, nor be the authority.
        """
        own = HKDF(hashes.SHA256(), SECRET_SIZE, None, b"tllm join token of a secret").derive(secret)
        return cls(own, Authority.of_secret(secret).fingerprint)

    @classmethod
    def of_authority(cls, authority: Authority) -> JoinToken:
        """The token of who has the authority's private key, as the first machine does that comes back."""
        own = HKDF(hashes.SHA256(), SECRET_SIZE, None, b"tllm join token of an authority").derive(authority.key_pem)
        return cls(own, authority.fingerprint)

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Read what `str` wrote, also where a terminal has broken it into lines. AuthError for anything else; it does
        not repeat the token."""
        text = "".join(text.split()).strip("'\"")
        body = text.removeprefix(PREFIX)
        try:
            raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if not text.startswith(PREFIX) or len(raw) != SECRET_SIZE + FINGERPRINT_SIZE:
            raise AuthError(
                f"this is not a join token ({len(text)} characters, and one has {LENGTH})",
                f"it starts with {PREFIX}; copy all of the line that the first machine printed, which narrow terminals "
                "show as two",
            )
        return cls(raw[:SECRET_SIZE], raw[SECRET_SIZE:])


class TokenRecord(msgspec.Struct):
    """An open join token: the SHA-256 of its secret, until when it is good, and for how many nodes more."""

    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    expires: float
    uses: int


class TokenBook:
    """The tokens a coordinator has given out. It keeps digests, not secrets. Clock: seconds, passed in.

    `on_stale()` is to be called where somebody was refused with a token that was good before.
    """

    def __init__(self, fingerprint: bytes) -> None:
        self._fingerprint = fingerprint
        self._entries: list[TokenRecord] = []
        self.on_stale: Callable[[], None] = lambda: None

    def restore(self, records: Iterable[TokenRecord]) -> None:
        """Take what another coordinator of the cluster has given out."""
        self._entries += [copy(record) for record in records]

    def records(self, now: float) -> tuple[TokenRecord, ...]:
        """The tokens that are still good."""
        return tuple(copy(entry) for entry in self._entries if entry.uses and now < entry.expires)

    def issue(self, now: float, uses: int = 1, seconds: float = HOUR) -> JoinToken:
        """A new token for `uses` nodes, good until `now + seconds`."""
        assert uses > 0 and seconds > 0
        secret = secrets.token_bytes(SECRET_SIZE)
        self._entries.append(TokenRecord(_digest(secret), now + seconds, uses))
        return JoinToken(secret, self._fingerprint)

    def keep(self, token: JoinToken, now: float) -> None:
        """Let whoever has this token join, as often as it likes."""
        self._entries.append(TokenRecord(_digest(token.secret), now + ALWAYS_SECONDS, ALWAYS_USES))

    def check(self, secret: bytes, now: float) -> None:
        """AuthError unless `secret` may still be used; StaleToken where it once might."""
        self._find(secret, now)

    def redeem(self, secret: bytes, now: float) -> None:
        """Take one use of the token. AuthError when it is unknown, expired or used up."""
        self._find(secret, now).uses -= 1

    def open_uses(self, tokens: Iterable[JoinToken], now: float) -> int:
        """How many nodes may still join by these."""
        digests = {_digest(token.secret) for token in tokens}
        return sum(entry.uses for entry in self._entries if entry.digest in digests and now < entry.expires)

    def _find(self, secret: bytes, now: float) -> TokenRecord:
        digest = _digest(secret)
        found = [entry for entry in self._entries if hmac.compare_digest(entry.digest, digest)]
        if not found:
            raise AuthError("the join token is not one of this cluster", f"copy the whole line {LAST}")
        entry = found[0]
        if now >= entry.expires:
            late = now - entry.expires
            raise StaleToken(f"the join token expired {late:.0f} s ago", f"take the line {LAST}")
        if entry.uses < 1:
            raise StaleToken("the join token has been used up", f"take the line {LAST}")
        return entry


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
