"""`Guard`: which requests are answered at all, by the host name asked for, the web page that asks, and the API key."""

from __future__ import annotations

import ipaddress
import re
import socket
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from tllm.server.admission.account import Account
from tllm.server.admission.key_ring import KeyRing
from tllm.server.http.cross_origin import preflight_reply, readable_by
from tllm.server.http.errors import HttpError, reply_of
from tllm.server.http.metrics import Metrics
from tllm.server.http.settings import ServerSettings, is_loopback

_ACCOUNT = "tllm.account"  # in a request's scope: that of its key; its name is in `scope["state"]["key"]`
_HOST = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9._-]{1,253}))(?::\d{1,5})?\Z")


PAGE_FILES = "/page/"
"""Where the files of the page at `/` are, which anyone may read: they are those of the package, and hold no secret."""


class Guard:
    """Denies by default: with keys set, only `/health` and what is below it, and the page's files answer without one.

    A foreign Host is a sign of DNS rebinding, a foreign Origin of another site's page; both are refused for every
    method. Addresses as Host are always fine, as no name was looked up. Browsers are told that pages which are allowed
    may call (`cross_origin`).
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics, keys: KeyRing) -> None:
        self._app = app
        self._metrics = metrics
        self._keys = keys
        names = {"localhost", *(name.lower() for name in settings.allowed_hosts)}
        if not is_loopback(settings.host):
            names |= {socket.gethostname().lower(), settings.host.lower()}
        self._names = names
        self._origins = frozenset(origin.rstrip("/").lower() for origin in settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse or hand on."""
        if scope["type"] == "http":
            origin = self._allowed_page(scope)
            if origin:
                send = readable_by(origin, send)
            try:
                self._check_names(scope)
                asked = preflight_reply(scope) if origin else None
                if asked is not None:
                    await asked(scope, receive, send)
                    return
                self._check_key(scope)
            except HttpError as error:
                await reply_of(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allowed_page(self, scope: Scope) -> str:
        """The origin of a page of another site that may call, "" for any other request."""
        values = _all(scope, b"origin")
        return values[0] if len(values) == 1 and values[0].lower() in self._origins else ""

    def _check_names(self, scope: Scope) -> None:
        host = self._host(_all(scope, b"host"))
        self._origin(_all(scope, b"origin"), host)

    def _check_key(self, scope: Scope) -> None:
        if not _is_open(scope["method"], scope["path"]):
            account = self._keys.anonymous
            if not self._keys.is_open:
                account = self._account(_all(scope, b"authorization"), _all(scope, b"x-api-key"))
            scope[_ACCOUNT] = account
            scope.setdefault("state", {})["key"] = account.key.name

    def _host(self, values: list[str]) -> str:
        match = _HOST.match(values[0]) if len(values) == 1 else None
        if match is None:
            raise HttpError(400, "the request needs one Host header, a name or an address", code="bad_host")
        name = (match["name"] or "").lower().rstrip(".")
        if match["six"] is None and "*" not in self._names and name not in self._names and not _is_address(name):
            message = f"this server does not answer to the name {name[:100]!r}; start it with --allow-host NAME"
            raise HttpError(403, message, "permission_error", "host_not_allowed")
        return values[0].lower()

    def _origin(self, values: list[str], host: str) -> None:
        for value in values:
            origin = value.lower()
            if origin not in self._origins and origin not in (f"http://{host}", f"https://{host}"):
                message = "requests from other sites' pages are refused; start the server with --allow-origin ORIGIN"
                raise HttpError(403, message, "permission_error", "origin_not_allowed")

    def _account(self, values: list[str], bare: list[str]) -> Account:
        """That of the key that was given; HttpError for any that is none of ours.

        `bare` are those of the header that clients of Anthropic's API send, where the other is not there.
        """
        if not values and len(bare) == 1:
            values = [f"Bearer {bare[0]}"]
        scheme, _, given = (values[0] if len(values) == 1 else "").partition(" ")
        account = self._keys.find(given.strip())
        if scheme.lower() != "bearer" or account is None:
            self._metrics.refused.inc()
            message = "a valid API key is needed: Authorization: Bearer KEY"
            headers = {"www-authenticate": "Bearer"}
            raise HttpError(401, message, "authentication_error", "invalid_api_key", headers=headers)
        return account


def keys_of(settings: ServerSettings) -> KeyRing:
    """The keys that a server's settings name. ConfigError for a file that is wrong."""
    hears_priorities = settings.scheduling_policy == "priority"
    return KeyRing(settings.api_keys, settings.api_keys_file, settings.rate_limit, hears_priorities)


def account_of(scope: Scope) -> Account | None:
    """That of a request's key; None for what is answered without one."""
    account: Account | None = scope.get(_ACCOUNT)
    return account


def key_of(scope: Scope) -> str:
    """The hash of the API key that a request came with, "" where no key is asked for."""
    account = account_of(scope)
    return account.key.digest.hex() if account is not None else ""


def cache_salt(scope: Scope, asked: str | None) -> str | None:
    """The salt of a request's prefixes: from its API key and the `cache_salt` that it asks for, if it has any.

    So nobody can find out, by the time that a reply takes, what those with another key have asked.
    """
    key = key_of(scope)
    return sha256(f"{key} {asked or ''}".encode()).hexdigest() if key or asked else None


def _is_open(method: str, path: str) -> bool:
    """Whether a request needs no key."""
    if path == "/health" or path.startswith("/health/"):
        return True
    return method in ("GET", "HEAD") and (path == "/" or path.startswith(PAGE_FILES))


def _all(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
