"""A small Hugging Face hub for tests: two real HTTP servers, one that speaks the hub's endpoints and one that stores
large files, to which the first sends clients on, as the real hub does.

A repository is a folder. Files of `LARGE` bytes and more are stored as large ones: `resolve` answers with a redirect
and the headers that pin them; others come straight from it. Revisions are commits of whole folders.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = 20_000
API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>.+))?")
RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


def commit_of(folder: Path) -> str:
    """A commit's hash: of all names and contents."""
    digest = hashlib.sha1()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@dataclass
class FakeRepository:
    """`revisions`: folder of each revision's name and of each commit. `readers`: the tokens that may fetch files of a
    gated one, None for everybody; a private one is hidden from all others."""

    revisions: dict[str, Path]
    readers: set[str] | None = None
    private: bool = False


@dataclass
class FakeHub:
    """`sent` counts bytes of large files by (token, file name). `requests` has each request's line. Faults:

    breaks: bytes after which the next answers of large files break off, one taken for each.
    storage_etag: what the storage server says of every file. `extra`: bytes that it sends beside what was asked for.
    linked_etag: instead of the true one, what the hub says pins a large file.
    ignores_ranges, status: of the storage server, which then gives whole files, or this HTTP status.
    shifted: bytes by which the storage server misses the range. storage_expired: it refuses one request, as it does
    where the address that the hub gave is old. stall: seconds that it takes to answer, once `goes_on` is set, as it is
    at first. altered: what it gives instead of the content of any file.
    """

    repositories: dict[str, FakeRepository] = field(default_factory=dict)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    requests: list[str] = field(default_factory=list)
    breaks: list[int] = field(default_factory=list)
    storage_etag: str = '"storage-1"'
    linked_etag: str = ""
    ignores_ranges: bool = False
    status: int = 0
    extra: int = 0
    shifted: int = 0
    storage_expired: bool = False
    stall: float = 0.0
    goes_on: threading.Event = field(default_factory=threading.Event)
    altered: bytes | None = None
    url: str = ""
    storage_url: str = ""

    def __post_init__(self) -> None:
        self.goes_on.set()

    def add(self, repo: str, folder: Path, revision: str = "main") -> str:
        """Put a folder's files under a revision of a repository. Returns the commit."""
        commit = commit_of(folder)
        known = self.repositories.setdefault(repo, FakeRepository({}))
        known.revisions |= {revision: folder, commit: folder}
        return commit

    def weights_sent(self, token: str | None = None) -> int:
        """Bytes of weights that went to whoever has this token, or to all."""
        return sum(
            count
            for (who, file), count in self.sent.items()
            if file.endswith((".safetensors", ".gguf")) and token in (None, who)
        )


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that runs for the length of the block."""
    hub = FakeHub()
    servers = [_Server(("127.0.0.1", 0), type(kind.__name__, (kind,), {"hub": hub})) for kind in (_Hub, _Storage)]
    hub.url, hub.storage_url = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join(5)


class _Server(ThreadingHTTPServer):
    """Clients that hang up are no fault of the server's."""

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Answers(BaseHTTPRequestHandler):
    """What both servers do alike."""

    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        raise NotImplementedError

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"", sent: int | None = None) -> None:
        """Headers, and of the body the first `sent` bytes, after which the connection ends."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:sent])
        if sent is not None and sent < len(body):
            self.close_connection = True


class _Hub(_Answers):
    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, token = unquote(url.path), self.headers.get("Authorization", "").removeprefix("Bearer ")
        if match := API.fullmatch(path):
            self._api(match["repo"], match["revision"] or "main", token)
        elif match := RESOLVE.fullmatch(path):
            self._resolve(match["repo"], match["revision"], match["file"], token)
        else:
            self.answer(404, {})

    def _api(self, repo: str, revision: str, token: str) -> None:
        found = self._folder(repo, revision, token)
        if found is None:
            return
        files = [self._listed(found, path) for path in sorted(found.rglob("*")) if path.is_file()]
        known = {"id": repo, "modelId": repo, "sha": commit_of(found), "siblings": files, "tags": [], "private": False}
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(known).encode())

    def _listed(self, folder: Path, path: Path) -> dict[str, object]:
        content = path.read_bytes()
        listed = {"rfilename": str(path.relative_to(folder)), "size": len(content), "blobId": _git_hash(content)}
        if len(content) >= LARGE:
            listed["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return listed

    def _resolve(self, repo: str, revision: str, file: str, token: str) -> None:
        folder = self._folder(repo, revision, token)
        if folder is None:
            return
        readers = self.hub.repositories[repo].readers
        if readers is not None and token not in readers:
            self.answer(403 if token else 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "it is gated"})
            return
        if not (folder / file).is_file():
            self.answer(404, {"X-Error-Code": "EntryNotFound"})
            return
        content = (folder / file).read_bytes()
        pinned = {"X-Repo-Commit": commit_of(folder)}
        if len(content) < LARGE:
            status, headers, body = _ranged(self.headers.get("Range"), content)
            self.answer(status, {**pinned, **headers, "ETag": f'"{_git_hash(content)}"'}, body)
            return
        etag = self.hub.linked_etag or hashlib.sha256(content).hexdigest()
        place = f"{self.hub.storage_url}/{repo}/{commit_of(folder)}/{file}?who={token}"
        headers = {"Location": place, "X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        self.answer(302, {**pinned, **headers})

    def _folder(self, repo: str, revision: str, token: str) -> Path | None:
        known = self.hub.repositories.get(repo)
        if known is None or (known.private and token not in (known.readers or ())):
            self.answer(404 if token else 401, {"X-Error-Code": "RepoNotFound"})
            return None
        if revision not in known.revisions:
            self.answer(404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return known.revisions[revision]


class _Storage(_Answers):
    def do_GET(self) -> None:
        hub, url = self.hub, urlsplit(self.path)
        assert "Authorization" not in self.headers, "a token that is for the hub came to the storage"
        org, name, commit, file = unquote(url.path).lstrip("/").split("/", 3)
        who = parse_qs(url.query).get("who", [""])[0]
        assert hub.goes_on.wait(60), "the test lets no answer go"
        time.sleep(hub.stall)
        if hub.storage_expired:
            hub.storage_expired = False
            self.answer(403, {})
            return
        if hub.status:
            self.answer(hub.status, {})
            return
        content = (hub.repositories[f"{org}/{name}"].revisions[commit] / file).read_bytes()
        content = content if hub.altered is None else hub.altered
        wanted = None if hub.ignores_ranges else self.headers.get("Range")
        status, headers, body = _ranged(wanted, content, hub.shifted)
        body += bytes(hub.extra)
        sent = min(hub.breaks.pop(0), len(body)) if hub.breaks and self.command == "GET" else len(body)
        if self.command == "GET":
            hub.sent[who, file] += sent
        self.answer(status, {**headers, "ETag": hub.storage_etag}, body, sent)


def _ranged(wanted: str | None, content: bytes, shifted: int = 0) -> tuple[int, dict[str, str], bytes]:
    """The answer to a request for a range, or for all."""
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "")
    if match is None:
        return 200, {}, content
    start, stop = int(match[1]) + shifted, min(int(match[2] or len(content) - 1) + 1 + shifted, len(content))
    return 206, {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}, content[start:stop]


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
