"""The page at `/`: files that lie beside this module, sent as they are. They hold no secret and need no key.

The page loads nothing from elsewhere, and its browser is told to allow nothing else (Content-Security-Policy).
"""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tllm.server.http.errors import HttpError

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class PageFiles:
    """All files of the page, read once."""

    def __init__(self) -> None:
        self._files = {
            entry.name: (entry.read_bytes(), _MEDIA_TYPES[suffix])
            for entry in files("tllm.server.page").joinpath("files").iterdir()
            if (suffix := "." + entry.name.rpartition(".")[2]) in _MEDIA_TYPES
        }

    async def index(self, http: HttpRequest) -> Response:
        """`GET /`: the page."""
        return self._reply("index.html")

    async def file(self, http: HttpRequest) -> Response:
        """`GET /page/NAME`: a file that the page asks for; 404 for names that are none of its files."""
        return self._reply(http.path_params["name"])

    def _reply(self, name: str) -> Response:
        if name not in self._files:
            raise HttpError(404, f"the page has no file {name[:100]!r}", "not_found_error")
        content, media_type = self._files[name]
        return Response(content, headers={**_HEADERS, "content-type": media_type})
