from __future__ import annotations

import copy
import http.client
import http.server
import io
import json
import socket
import threading
import urllib.error
import urllib.request
from email.message import Message
from typing import Any, ClassVar

import pytest

from tllm.cli.commands.status import as_text, network_lines
from tllm.cli.main import main

NODE = {
    "node": "lab-2",
    "address": "10.0.0.2:4000",
    "phase": "ready",
    "reason": "",
    "rank": 1,
    "stage": 1,
    "layers": [2, 6],
    "share": 0.75,
    "parameter_bytes": 5 << 20,
    "cache_bytes": 1 << 20,
    "loading": {"done": 0, "total": 0},
    "bytes_read": 5 << 20,
    "rss_bytes": 200 << 20,
    "peak_bytes": 210 << 20,
    "memory_bytes": 1 << 30,
    "memory_given": True,
    "device": "cuda:0 Some GPU",
    "links": {"1>0": 2048, "0>1": 4096},
}
SERVES: dict[str, Any] = {
    "doing": "serves, epoch 1",
    "losses": 0,
    "wanted": "pp=2",
    "weights": {"brought": [], "liars": []},
}
FOUND: dict[str, Any] = {
    "model": "m",
    "ready": True,
    "plan": "pp=2",
    "fault": "",
    "trouble": "",
    "nodes": [NODE],
    **SERVES,
}


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the server answers; requests are added to it."""
    seen: list[Any] = [json.dumps(FOUND).encode()]

    def opened(self: object, asked: urllib.request.Request, *, timeout: float) -> io.BytesIO:
        seen.append(asked)
        if isinstance(seen[0], Exception):
            raise seen[0]
        return io.BytesIO(seen[0])

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", opened)
    return seen


def refused(code: int, said: Any = None) -> urllib.error.HTTPError:
    body = io.BytesIO(b"<html>" if said is None else json.dumps(said).encode())
    return urllib.error.HTTPError("http://x", code, http.server.HTTPStatus(code).phrase, Message(), body)


def test_a_row_for_each_node(answer: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--port", "9", "--api-key", "secret-key"]) == 0
    shown = capsys.readouterr().out
    assert "m: ready, plan pp=2" in shown
    assert "lab-2 computes on cuda:0 Some GPU" in shown
    assert "lab-2  ready      1  [2, 6)   75 %  5.0 MiB  1.0 MiB  200.0 MiB  210.0 MiB  1.00 GiB  5.0 MiB" in shown
    assert "links: 0>1 4.0 KiB, 1>0 2.0 KiB" in shown
    assert answer[1].full_url == "http://127.0.0.1:9/v1/cluster"
    assert answer[1].get_header("Authorization") == "Bearer secret-key"


def test_memory_that_nobody_was_given_has_no_column() -> None:
    assert "given" in as_text(FOUND)
    found = copy.deepcopy(FOUND)
    found["nodes"][0]["memory_given"] = False
    assert "given" not in as_text(found)


def test_what_the_prefix_cache_found() -> None:
    found = copy.deepcopy(FOUND)
    assert "prefix" not in as_text(found)
    found["nodes"][0] |= {"rank": 0, "stats": {"prefix_queries": 12000.0, "prefix_hits": 9000.0}}
    assert "prefix cache: 9,000 of 12,000 tokens were found (75 %)" in as_text(found)
    found["nodes"][0]["stats"] = {"prefix_queries": 0.0, "prefix_hits": 0.0}
    assert "prefix" not in as_text(found)


def test_who_took_weights_from_whom() -> None:
    found = copy.deepcopy(FOUND)
    assert "passed on" not in as_text(found)
    found["weights"]["brought"] = [
        {"node": "lab-2", "source": "coordinator", "bytes": 3 << 20},
        {"node": "lab-3", "source": "lab-2", "bytes": 1 << 20},
    ]
    found["weights"]["liars"] = ["lab-4"]
    shown = as_text(found)
    assert "weights passed on: lab-2 3.0 MiB from coordinator, lab-3 1.0 MiB from lab-2" in shown
    assert "lab-4 gave wrong bytes of weights" in shown


def test_json_is_what_the_server_says(answer: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == FOUND


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        (refused(401), 5, "asks for an API key, and none was given"),
        (refused(403, {"error": {"message": "the host is not allowed"}}), 5, "refuses: the host is not allowed"),
        (refused(503, {"error": {"message": "it ends"}}), 4, "answers 503: it ends"),
        (refused(503), 4, "127.0.0.1:8000 answers 503 Service Unavailable"),
        (refused(502), 4, "127.0.0.1:8000 answers 502 Bad Gateway"),
        (
            refused(404, {"error": {"message": "no route"}}),
            4,
            "127.0.0.1:8000 is no HTTP server of tllm: it answers 404 Not Found",
        ),
        (urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")), 4, "no server at 127.0.0.1:8000"),
        (urllib.error.URLError(socket.gaierror(-2, "Name or service not known")), 4, "Name or service not known"),
        (TimeoutError("timed out"), 4, "127.0.0.1:8000 did not answer within 10 s"),
        (urllib.error.URLError(TimeoutError("timed out")), 4, "did not answer within 10 s"),
        (http.client.RemoteDisconnected("closed"), 4, "127.0.0.1:8000 closed the connection without an answer"),
        (http.client.IncompleteRead(b"{"), 4, "closed the connection without an answer"),
        (ConnectionResetError(104, "Connection reset by peer"), 4, "closed the connection without an answer"),
        (urllib.error.URLError(BrokenPipeError(32, "Broken pipe")), 4, "closed the connection without an answer"),
        (http.client.BadStatusLine("SSH-2.0"), 4, "it does not speak HTTP"),
        (b"<html>", 4, "it answers /v1/cluster with something else than JSON"),
        (b"[1]", 4, "127.0.0.1:8000 is no HTTP server of tllm: it answers /v1/cluster with [1]"),
        (b'{"detail": 3}', 4, 'it answers /v1/cluster with {"detail": 3}'),
    ],
)
def test_who_does_not_answer(
    said: Any, code: int, words: str, answer: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answer[0] = said
    assert main(["status"]) == code
    told, *hints = capsys.readouterr().err.splitlines()
    assert words in told
    assert len(hints) == ("refuses" not in words), "the server says itself what to do about a refusal"


def test_a_wrong_key_is_another_fault_than_none(answer: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    answer[0] = refused(401)
    assert main(["status", "--api-key", "secret-key"]) == 5
    said = capsys.readouterr().err
    assert "does not take the API key that was given" in said and "secret-key" not in said


@pytest.mark.parametrize("where", ["10.0.0.2:4000", "http://10.0.0.2:4000", "http://10.0.0.2:4000/v1"])
def test_the_address_as_the_server_printed_it(where: str, answer: list[Any]) -> None:
    assert main(["status", where]) == 0
    assert answer[1].full_url == "http://10.0.0.2:4000/v1/cluster"


@pytest.mark.parametrize(
    ("where", "asked"),
    [
        ("127.0.0.1:8000", "127.0.0.1:8000"),
        ("[::1]:8000", "[::1]:8000"),
        ("localhost:8000", "localhost:8000"),
        ("10.0.0.2:8000", "proxy:3128"),
    ],
)
def test_a_proxy_is_not_asked_for_this_machine_itself(where: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()

    def http_open(self: object, request: urllib.request.Request) -> None:
        told.append(request.host)
        raise urllib.error.URLError(ConnectionRefusedError(111, "Connection refused"))

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setattr(urllib.request.HTTPHandler, "http_open", http_open)
    assert main(["status", where, "--api-key", "secret-key"]) == 4
    assert told == [asked]


class Redirects(http.server.BaseHTTPRequestHandler):
    """A program at the address of a server that has ended."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(f"{self.path} {self.headers['authorization']}")
        self.send_response(302)
        self.send_header("location", f"http://127.0.0.1:{self.server.server_address[1]}/elsewhere")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Nothing."""


def test_a_redirect_does_not_get_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Redirects) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert main(["status", f"127.0.0.1:{server.server_port}", "--api-key", "secret-key"]) == 4
        server.shutdown()
    assert Redirects.asked == ["/v1/cluster Bearer secret-key"]
    assert "is no HTTP server of tllm: it answers 302 Found" in capsys.readouterr().err


def test_what_is_no_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "https//lab"]) == 2
    assert "is not HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["schlüssel-k\r", "k\nx: y", "ключ-k", "k\udcff"])
def test_a_key_that_no_header_holds_is_not_shown(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TLLM_API_KEY", key.encode(errors="surrogateescape").decode(errors="surrogateescape"))
    assert main(["status", "127.0.0.1:1"]) == 2
    told, hint = capsys.readouterr().err.splitlines()
    assert "the API key has a character that no HTTP header holds" in told and hint.startswith("hint: ")
    assert key.strip() not in told + hint and ascii(key)[1:-1] not in told + hint


@pytest.mark.parametrize("host", ["a..b", "foo bar", "http://foo", "x" * 70 + ".é"])
def test_a_host_that_is_none(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--host", host]) == 2
    assert "is no address of a server" in capsys.readouterr().err


def test_an_address_is_given_once(answer: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--host", "127.0.0.1"], ["--port", "8000"]):
        assert main(["status", "10.0.0.2:4000", *words]) == 2
        assert "the server is given as HOST:PORT and by --host or --port" in capsys.readouterr().err
    assert len(answer) == 1, "nobody was asked"


def test_what_is_lost_and_what_is_done_about_it() -> None:
    assert as_text(FOUND).splitlines()[1] == ""
    found = {**copy.deepcopy(FOUND), "plan": "pp=1", "losses": 2, "doing": "serves, epoch 3"}
    assert as_text(found).splitlines()[:3] == [
        "m: ready, plan pp=1",
        "serves, epoch 3; 2 nodes lost so far",
        "the whole plan is pp=2",
    ]
    late = {**found, "trouble": "node lab-2 has been silent for 2.1 s"}
    assert "trouble: node lab-2 has been silent for 2.1 s" in as_text(late)
    assert "trouble" not in as_text({**late, "fault": "nobody is left"}), "which says it all"


def test_nodes_that_load_wait_or_are_lost() -> None:
    found = copy.deepcopy(FOUND)
    found.update(ready=False, plan="", doing="begins epoch 1: lab-2 loading")
    found["nodes"][0].update(phase="loading", loading={"done": 1, "total": 4})
    waiting = {**NODE, "node": "lab-3", "rank": None, "stage": None, "layers": None, "share": None, "phase": "joined"}
    lost = {**NODE, "node": "lab-1", "rank": 0, "phase": "lost", "reason": "it went away"}
    found["nodes"] += [waiting, lost]
    lines = as_text(found).splitlines()
    assert lines[0] == "m: not ready, plan none yet"
    assert lines[1] == "begins epoch 1: lab-2 loading; 0 nodes lost so far"
    order = [line.split()[1] for line in lines[4:7]]
    assert order[:2] == ["lab-1", "lab-2"]
    assert "loading 25 %" in lines[5]
    assert "lab-3" in lines[6]
    assert "lab-1 is lost: it went away" in lines


def test_what_ranks_measured_is_said_once() -> None:
    nodes = [{"network": words} for words in ("tp: 5.00 ms", "tp: 5.00 ms", "", "tp: 0.10 ms")]
    assert network_lines({"nodes": nodes}) == ["network: tp: 5.00 ms", "network: tp: 0.10 ms"]


@pytest.mark.parametrize(
    ("nodes", "eligible", "said"),
    [
        (
            ["coordinator"],
            [],
            "only coordinator knows the cluster's state, and it ends with it; no node could coordinate",
        ),
        (
            ["coordinator", "b", "c"],
            ["b", "c"],
            "the cluster's state is on coordinator, b, c: any 1 of these may be lost; b, c could coordinate",
        ),
    ],
)
def test_who_could_coordinate(nodes: list[str], eligible: list[str], said: str) -> None:
    found = {**FOUND, "replicas": {"term": 1, "wanted": 3, "nodes": nodes, "eligible": eligible}}
    assert said in as_text(found)
    assert "cluster's state" not in as_text(FOUND)
