"""CORS: what tells a browser that a page of another site may call this server, and read what it is answered.

The Fetch Standard (https://fetch.spec.whatwg.org/#http-cors-protocol) has the headers. Without them a browser asks
before each request whether it may (the preflight), and gives the page no reply.
"""

from __future__ import annotations

import re

from starlette.responses import Response
from starlette.types import Message, Scope, Send

METHODS = "GET, HEAD, POST, DELETE"
EXPOSED = (
    "content-location, retry-after, retry-after-ms, x-request-id, x-should-retry, "
    "x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
"""Headers of replies that a page may read, beside those that any page may."""

PREFLIGHT_SECONDS = 600
"""For so long a browser need not ask again."""

_HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,2048}\Z")


def preflight_reply(scope: Scope) -> Response | None:
    """The reply to a browser that asks whether a page that is allowed may send a request, which needs no key; None for
    any other request. Whatever headers the page wants to send are fine: clients have many of their own."""
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    if scope["method"] != "OPTIONS" or b"access-control-request-method" not in headers:
        return None
    allowed = {"access-control-allow-methods": METHODS, "access-control-max-age": str(PREFLIGHT_SECONDS)}
    wanted = headers.get(b"access-control-request-headers", "")
    if _HEADER_NAMES.match(wanted):
        allowed["access-control-allow-headers"] = wanted
    return Response(status_code=204, headers=allowed)


def readable_by(origin: str, send: Send) -> Send:
    """Sends replies that a page of this origin may read."""
    more = {"access-control-allow-origin": origin, "access-control-expose-headers": EXPOSED, "vary": "Origin"}
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in more.items()]

    async def send_readable(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *encoded]}
        await send(message)

    return send_readable
