"""Keys, host names and other sites' pages: deny by default, on every path and every method."""

from __future__ import annotations

import socket

import pytest

from tests.unit.server.kit import get, refusal, say, serve

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
