"""Keys, host names and other sites' pages: deny by default, on every path and every method."""

from __future__ import annotations

import socket

import pytest

from tests.unit.server.kit import get, post, refusal, say, serve

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "WEIRD"]
PATHS = [
    "/page",
    "/pages/x",
    "/v1/models",
    "/v1/completions",
    "/v1/cluster",
    "/metrics",
    "/version",
    "/tokenize",
    "/nope",
    "/healthy",
]
KEYS = ("first-key-1", "second-key-2")


@pytest.mark.parametrize("path", [*PATHS, "http://127.0.0.1:8000//health", "/HEALTH", "/v1/models?x=/health"])
@pytest.mark.parametrize("method", METHODS)
def test_without_a_key_only_health_and_the_page_answer(path: str, method: str) -> None:
    app = serve(say(), api_keys=KEYS)
    response = get(app, path, method)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert get(app, "/health").status_code == 200
    assert get(app, "/health/ready").status_code == 200


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", "Bearer first-key-", "Bearer first-key-12", "Basic first-key-1", "first-key-1"]
)
def test_wrong_keys_are_refused_and_counted(value: str) -> None:
    app = serve(say(), api_keys=KEYS)
    error = refusal(get(app, "/v1/models", headers={"authorization": value}), 401)
    assert error["code"] == "invalid_api_key"
    assert "first-key" not in error["message"]
    shown = get(app, "/metrics", headers={"authorization": f"Bearer {KEYS[1]}"}).text
    assert "tllm_auth_failures_total 1.0" in shown


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(key: str) -> None:
    app = serve(say(), api_keys=KEYS)
    assert get(app, "/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert get(app, "/v1/models", headers={"authorization": f"bearer {key}"}).status_code == 200


def test_without_keys_an_empty_bearer_is_fine() -> None:
    app = serve(say())
    assert get(app, "/v1/models", headers={"authorization": "Bearer "}).status_code == 200
    assert get(app, "/v1/models", headers={"authorization": "Bearer whatever"}).status_code == 200


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/v1/completions"])
def test_foreign_hosts_and_origins_are_refused_for_every_method(path: str, method: str) -> None:
    app = serve(say())
    assert get(app, path, method, headers={"host": "evil.example"}).status_code == 403
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9", "https://127.0.0.1.evil.example:8000"):
        response = get(app, path, method, headers={"origin": origin})
        assert response.status_code == 403
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "host", ["", "a/b", "a?b", "a#b", "user@localhost", "localhost:x", "[::1", "a b", "localhost:123456"]
)
def test_hosts_that_are_no_hosts(host: str) -> None:
    assert refusal(get(serve(say()), "/health", headers={"host": host}), 400)["code"] == "bad_host"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "localhost.", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3"])
def test_own_names_and_addresses_are_fine(host: str) -> None:
    assert get(serve(say()), "/health", headers={"host": host}).status_code == 200


def test_names_and_pages_that_were_allowed() -> None:
    app = serve(say(), allowed_hosts=("gpu.lan",), allowed_origins=("https://chat.lan",))
    assert get(app, "/health", headers={"host": "GPU.lan:80"}).status_code == 200
    assert get(app, "/health", headers={"origin": "https://chat.lan"}).status_code == 200
    assert get(app, "/health", headers={"origin": "http://127.0.0.1:8000"}).status_code == 200
    assert get(app, "/health", headers={"host": "gpu.lan.evil"}).status_code == 403
    assert get(serve(say(), allowed_hosts=("*",)), "/health", headers={"host": "any.name"}).status_code == 200
    mine = socket.gethostname().lower()
    wide = serve(say(), host="0.0.0.0", api_keys=KEYS)
    assert get(wide, "/health", headers={"host": mine}).status_code == 200
    assert get(wide, "/health", headers={"host": "evil.example"}).status_code == 403


def test_a_page_that_is_allowed_may_call_from_a_browser() -> None:
    """A browser sends the page's request once the preflight, which brings no key, was answered, and gives the page only
    replies that name its origin."""
    app = serve(say(), api_keys=KEYS, allowed_origins=("https://chat.lan",))
    page = {"origin": "https://chat.lan"}
    wanted = "authorization,content-type,x-stainless-lang"
    asks = {**page, "access-control-request-method": "POST", "access-control-request-headers": wanted}
    preflight = get(app, "/v1/chat/completions", "OPTIONS", headers=asks)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://chat.lan"
    assert preflight.headers["access-control-allow-headers"] == wanted
    assert "POST" in preflight.headers["access-control-allow-methods"]
    key = {**page, "authorization": f"Bearer {KEYS[0]}"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    replies = [
        get(app, "/v1/models", headers=key),
        get(app, "/v1/models", headers=page),  # 401, whose words the page may show
        post(app, "/v1/chat/completions", body, headers=key),
        post(app, "/v1/chat/completions", {**body, "stream": True}, headers=key),
        post(app, "/v1/chat/completions", b"{", headers=key),
    ]
    assert [reply.status_code for reply in replies] == [200, 401, 200, 200, 400]
    for reply in replies:
        assert reply.headers.get_list("access-control-allow-origin") == ["https://chat.lan"]
        assert reply.headers["vary"] == "Origin"
        assert "x-request-id" in reply.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origin", ["https://chat.lan.evil", "http://chat.lan", "null", "http://127.0.0.1:8000"])
def test_no_other_page_is_told_that_it_may_call(origin: str) -> None:
    app = serve(say(), api_keys=KEYS, allowed_origins=("https://chat.lan",))
    asks = {"origin": origin, "access-control-request-method": "POST"}
    for method, path in (("OPTIONS", "/v1/models"), ("GET", "/health"), ("GET", "/v1/models")):
        response = get(app, path, method, headers=asks)
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert response.status_code == 200 if path == "/health" and "127" in origin else response.status_code >= 400


def test_headers_that_a_page_asks_for_are_names_and_nothing_else() -> None:
    app = serve(say(), allowed_origins=("https://chat.lan",))
    asks = {"origin": "https://chat.lan", "access-control-request-method": "GET"}
    reply = get(app, "/", "OPTIONS", headers={**asks, "access-control-request-headers": "a;b=<c>"})
    assert reply.status_code == 204 and "access-control-allow-headers" not in reply.headers
    twice = [("host", "localhost"), ("origin", "https://chat.lan"), ("origin", "https://chat.lan")]
    reply = get(app, "/health", headers=twice)
    assert "access-control-allow-origin" not in reply.headers
