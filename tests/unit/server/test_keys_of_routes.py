"""Keys of a file on every route; what each key is given, refused and counted; places that others keep."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from tests.unit.server.kit import client, get, post, refusal, run, say, serve
from tllm.server.admission.token_bucket import RateLimits
from tllm.server.app import App
from tllm.server.http import metrics as metrics_module
from tllm.server.http.auth import account_of

KEYS = {"alice": "alice-key-1", "bob": "bob-key-22", "carol": "carol-key-3"}
PATH = "/v1/completions"
GOOD = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


def keys_file(folder: Path, **more: dict[str, Any]) -> str:
    path = folder / "keys.json"
    entries = [{"name": name, "key": key, **more.get(name, {})} for name, key in KEYS.items()]
    path.write_text(json.dumps({"keys": entries}))
    return str(path)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def routes(app: App) -> list[tuple[str, str]]:
    """Every method and path that the application answers."""
    found = app._attended._app.routes  # type: ignore[attr-defined]
    assert len(found) > 20 and all(isinstance(route, Route) for route in found)
    return [
        (method, route.path.replace("{name}", "app.js").replace("{name:path}", "tiny"))
        for route in found
        for method in route.methods - {"HEAD"}
    ]


def test_every_route_needs_a_key_of_the_file_but_health_and_the_page(tmp_path: Path) -> None:
    app = serve(say(), api_keys_file=keys_file(tmp_path), api_keys=("the-option-1",))
    for method, path in routes(app):
        is_open = path.startswith(("/health", "/page/")) or path == "/"
        assert (get(app, path, method).status_code != 401) == is_open, path
        assert get(app, path, method, headers={"authorization": "Bearer wrong-key-1"}).status_code == 401 or is_open
        for key in (*KEYS.values(), "the-option-1"):
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                assert get(app, path, method, headers=headers).status_code not in (401, 403), path


def test_every_route_refuses_foreign_names_and_foreign_pages_even_with_a_key(tmp_path: Path) -> None:
    app = serve(say(), api_keys_file=keys_file(tmp_path))
    for method, path in routes(app):
        for wrong in ({"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}):
            reply = get(app, path, method, headers={**bearer("alice"), **wrong})
            assert reply.status_code == 403, (path, wrong)
        assert get(app, path, method, headers={**bearer("alice"), "host": "localhost:8000"}).status_code != 403


def test_the_name_of_a_key_is_on_the_requests_state(tmp_path: Path) -> None:
    app, seen = serve(say(), api_keys_file=keys_file(tmp_path)), []
    inner = app._attended._app

    async def look(scope: Any, receive: Any, send: Any) -> None:
        account = account_of(scope)
        seen.append((scope["state"]["key"], account and account.key.name))
        await inner(scope, receive, send)

    app._attended._app = look
    get(app, "/v1/models", headers=bearer("bob"))
    app.keys.accounts.clear()
    app.keys._file = None
    get(app, "/v1/models")
    assert seen == [("bob", "bob"), ("anonymous", "anonymous")]


def test_keys_have_their_own_limits_prefixes_and_places(tmp_path: Path) -> None:
    engine = say()
    more = {"alice": {"requests_per_minute": 1, "weight": 2.0}, "bob": {"max_concurrent": 1}}
    app = serve(engine, api_keys_file=keys_file(tmp_path, **more))
    assert post(app, PATH, GOOD, headers=bearer("alice")).status_code == 200
    refused = post(app, PATH, GOOD, headers=bearer("alice"))
    assert refusal(refused, 429)["code"] == "rate_limit_exceeded"
    assert refusal(refused, 429)["param"] == "requests_per_minute"
    for _ in range(3):
        assert post(app, PATH, GOOD, headers=bearer("bob")).status_code == 200
    terms = [(one.scheduling.tenant, one.scheduling.weight) for one in engine.submitted]
    assert terms == [("alice", 2.0), *[("bob", 1.0)] * 3]
    assert len({one.cache_salt for one in engine.submitted}) == 2

    async def crowd() -> list[httpx.Response]:
        engine.hold_after = 0
        async with client(app) as http:
            held = asyncio.create_task(http.post(PATH, json=GOOD, headers=bearer("bob")))
            while not app.router.in_hand:
                await asyncio.sleep(0.001)
            refused = await http.post(PATH, json=GOOD, headers=bearer("bob"))
            engine.go_on.set()
            return [refused, await held]

    refused, served = run(crowd())
    assert refusal(refused, 429)["param"] == "max_concurrent" and served.status_code == 200


def test_one_key_never_has_all_places(tmp_path: Path) -> None:
    engine = say()
    engine.hold_after = 0
    app = serve(engine, api_keys_file=keys_file(tmp_path), max_sequences=16)

    async def crowd() -> tuple[int, int, int]:
        async with client(app) as http:

            async def ask(name: str, count: int) -> list[asyncio.Task[httpx.Response]]:
                before = app.router.in_hand
                asked = [asyncio.create_task(http.post(PATH, json=GOOD, headers=bearer(name))) for _ in range(count)]
                while app.router.in_hand - before + sum(one.done() for one in asked) < count:
                    await asyncio.sleep(0.001)
                return asked

            greedy, second, single = await ask("alice", 30), await ask("bob", 30), await ask("carol", 1)
            engine.go_on.set()
            replies = [[(await one).status_code for one in asked] for asked in (greedy, second, single)]
            return replies[0].count(200), replies[1].count(200), replies[2].count(200)

    # Three times what is free: 12 of 16, then 3 of the 4 that are left; a place stays for whoever comes last.
    assert run(crowd()) == (12, 3, 1)
    assert app.router.in_hand == 0


def test_a_key_hears_its_own_priority_and_none_more_urgent(tmp_path: Path) -> None:
    engine = say()
    file = keys_file(tmp_path, alice={"priority": 5})
    app = serve(engine, api_keys_file=file, scheduling_policy="priority")
    for name, asked in (("alice", None), ("alice", -3), ("alice", 9), ("bob", None), ("bob", -3)):
        post(app, PATH, {**GOOD, "priority": asked}, headers=bearer(name))
    assert [one.scheduling.priority for one in engine.submitted] == [5, 5, 9, 0, -3]


def test_what_keys_use_is_counted_under_few_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MAX_KEY_LABELS", 2)
    engine = say(" one two")
    engine.cached = lambda request: list(request.prompt_ids[:1])
    app = serve(engine, api_keys_file=keys_file(tmp_path, bob={"requests_per_minute": 1}))
    replies = [post(app, PATH, GOOD, headers=bearer(name)) for name in ("alice", "alice", "bob", "bob", "carol")]
    generated = sum(reply.json()["usage"]["completion_tokens"] for reply in replies[:2])
    shown = get(app, "/metrics", headers=bearer("alice")).text
    size = len(engine.submitted[0].prompt_ids)

    def value(metric: str, key: str, more: str = "") -> float:
        start = f'{metric}{{engine="0",key="{key}"{more},model_name="tiny"}} '
        [line] = [line for line in shown.splitlines() if line.startswith(start)]
        return float(line.removeprefix(start))

    assert value("tllm_key_requests_total", "alice") == 2 and value("tllm_key_requests_total", "others") == 1
    assert value("tllm_key_refused_total", "bob", ',limit="requests_per_minute"') == 1
    assert value("tllm_key_prompt_tokens_total", "alice") == 2 * size
    assert value("tllm_key_cached_tokens_total", "alice") == 2
    assert value("tllm_key_generation_tokens_total", "alice") == generated > 0
    assert '"carol"' not in shown and "alice-key" not in shown
    assert 'tllm_api_keys_file_is_faulty{engine="0",model_name="tiny"} 0.0' in shown


def test_a_wrong_file_is_seen_in_the_metrics(tmp_path: Path) -> None:
    app = serve(say(), api_keys_file=keys_file(tmp_path))
    (tmp_path / "keys.json").write_text("{")
    app.keys.look()
    app.keys.look()
    shown = get(app, "/metrics", headers=bearer("alice")).text
    assert 'tllm_api_keys_file_is_faulty{engine="0",model_name="tiny"} 1.0' in shown
    assert 'tllm_api_keys_file_faults_total{engine="0",model_name="tiny"} 1.0' in shown
    keys_file(tmp_path)
    app.keys.look()
    app.keys.look()
    assert "is_faulty{" in (shown := get(app, "/metrics", headers=bearer("alice")).text)
    assert 'tllm_api_keys_file_is_faulty{engine="0",model_name="tiny"} 0.0' in shown


def test_where_no_key_is_needed_everybody_is_one(tmp_path: Path) -> None:
    app = serve(say(), rate_limit=RateLimits(requests_per_minute=1))
    assert post(app, PATH, GOOD).status_code == 200
    assert "anonymous" in refusal(post(app, PATH, GOOD, headers={"authorization": "Bearer x"}), 429)["message"]
