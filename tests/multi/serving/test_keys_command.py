"""Keys of a file on one server of its own process: limits, fair turns, and a file that changes while it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster.commands import running
from tests.support.models.families import save_model

pytestmark = pytest.mark.timeout(300)

ALICE, BOB, CAROL, DAVE = "alice-key-1", "bob-key-22", "carol-key-3", "dave-key-44"
FILE = f"""
[[keys]]
name = "alice"
key = "{ALICE}"

[[keys]]
name = "bob"
key = "{BOB}"

[[keys]]
name = "dave"
key = "{DAVE}"
requests_per_minute = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_model("llama", made)
    return made


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    """One for all requests: a client of its own would take a request longer than its way."""
    with httpx.Client(timeout=120, limits=httpx.Limits(max_connections=None)) as made:
        yield made


def ask(http: httpx.Client, url: str, key: str, seed: int, tokens: int = 8) -> httpx.Response:
    body = {"prompt": [1, 2, 3 + seed], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"}
    return http.post(f"{url}/completions", json={**body, "return_token_ids": True}, headers=headers)


def ids(reply: httpx.Response) -> list[int]:
    assert reply.status_code == 200, reply.text
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def write(path: Path, text: str) -> None:
    new = path.with_name("new")
    new.write_text(text)
    new.replace(path)


def eventually_status(url: str, key: str, status: int) -> None:
    until = time.monotonic() + 60
    while httpx.get(f"{url}/models", headers={"authorization": f"Bearer {key}"}).status_code != status:
        assert time.monotonic() < until, f"the key {key} never got {status}"
        time.sleep(0.1)


def faulty(url: str, key: str) -> list[str]:
    """What the metrics say of the file of keys, for one whose key is still taken."""
    shown = httpx.get(f"{url.removesuffix('/v1')}/metrics", headers={"authorization": f"Bearer {key}"}, timeout=60)
    assert shown.status_code == 200, shown.text
    lines = shown.text.splitlines()
    return [line.split()[-1] for line in lines if line.startswith("tllm_api_keys_file_is_faulty")]


def in_hand_with(http: httpx.Client, url: str, others: Callable[[], int], one: Future[Any]) -> int:
    """How many requests the server has in hand, once they are more than the others: this one, too. Its others are those
    that have not ended, of which the client may not know yet."""
    while True:
        most = others()
        shown = http.get(f"{url.removesuffix('/v1')}/metrics", headers={"authorization": f"Bearer {ALICE}"}).text
        lines = [line for line in shown.splitlines() if line.startswith(("vllm:num_requests_r", "vllm:num_requests_w"))]
        count = round(sum(float(line.split()[-1]) for line in lines))
        if count > most or one.done():
            return count
        time.sleep(0.005)


def test_keys_have_turns_and_limits(folder: Path, http: httpx.Client, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    words = ["--port", "0", "--api-keys-file", str(path), "--max-num-seqs", "1"]
    with running("serve", str(folder), *words) as server, ThreadPoolExecutor(16) as pool:
        url = server.until(r"serving .* at (\S+)")[1]
        assert httpx.get(f"{url}/models").status_code == 401
        alone = ids(ask(http, url, BOB, 0))
        order = list[str]()

        def finish(name: str, key: str, seed: int, tokens: int) -> list[int]:
            made = ids(ask(http, url, key, seed, tokens))
            order.append(name)
            return made

        # Each of alice's takes much longer than a request is on its way.
        many = [pool.submit(finish, "alice", ALICE, seed, 72) for seed in range(12)]
        while len(order) < 2:
            assert not any(one.done() and one.exception() for one in many), [
                one.exception() for one in many if one.done()
            ]
            time.sleep(0.02)
        single = pool.submit(finish, "bob", BOB, 0, 8)
        ended = len(many) + 1 - in_hand_with(http, url, lambda: len(many) - len(order), single)
        assert single.result() == alone, "order changes no token"
        # One of alice's ran when bob's request came; then it is bob's turn.
        ahead = order.index("bob")
        assert all(len(one.result()) == 72 for one in many)
        assert ahead <= ended + 2, f"{ahead} of 12 went first, {ended} of them before bob asked"

        left = [ask(http, url, DAVE, 0, tokens=1).headers["x-ratelimit-remaining-requests"] for _ in range(2)]
        assert left == ["1", "0"]
        refused = ask(http, url, DAVE, 0, tokens=1)
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 30
        assert ids(ask(http, url, ALICE, 0, tokens=1)), "others are not concerned"

        write(path, FILE.replace("alice-key-1", CAROL).replace('"alice"', '"carol"'))
        eventually_status(url, CAROL, 200)
        eventually_status(url, ALICE, 401)
        write(path, "[[keys]]\nname = 3")
        until = time.monotonic() + 60
        while faulty(url, CAROL) != ["1.0"]:
            assert time.monotonic() < until, "nobody looked at the file"
            time.sleep(0.1)
        said = server.interrupt()[1]
    assert "THE FILE OF API KEYS WAS NOT TAKEN" in said and CAROL not in said


def test_a_wrong_file_of_keys_stops_the_start(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": "a", "key": "short"}]}))
    with running("serve", str(folder), "--port", "0", "--api-keys-file", str(path)) as server:
        code, said = server.wait()
    assert code == 2 and "at least 8 printable" in said and "hint:" in said
    assert "has a certificate now" not in said and "is ready" not in said, "before the model is loaded"
