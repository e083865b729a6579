"""Rewards of HTTP servers: what they are asked, and one clear line for each way in which they fail."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat
from typing import Any

import msgspec
import pytest

from tllm.core.errors import ConfigError
from tllm.core.timing import AwakeClock, Deadline
from tllm.server.pooling.requests import ScoreRequest
from tllm.training.policy import http_rewards, reward_functions
from tllm.training.policy.http_rewards import http_reward

ARGUMENTS = {"prompts": ["1=", "2="], "completions": ["a", "bb"], "completion_ids": [[1], [2, 2]], "count": [1, 2]}
Answer = Callable[[Any], tuple[int, Any]]


class Verifier:
    """A server in a thread that answers as it is told, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.answer: Answer = lambda question: (200, {"rewards": [1.0, None]})
        verifier = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                question = self.rfile.read(int(self.headers["content-length"] or 0)) or b"null"
                verifier.paths.append(self.path)
                verifier.asked.append(question)
                verifier.keys.append(self.headers["authorization"])
                status, told = verifier.answer(json.loads(question))
                content = told if isinstance(told, bytes) else json.dumps(told).encode()
                self.send_response(status)
                if status == 302:
                    self.send_header("location", f"{verifier.url}/elsewhere")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def verifier() -> Iterator[Verifier]:
    made = Verifier()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_verifier_is_asked_as_a_function_is_and_may_say_nothing(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(http_rewards.KEY_VARIABLE, "secret")
    said, unsaid = http_reward(f"{verifier.url}/verify", 20)(ARGUMENTS)
    assert said == 1.0 and math.isnan(unsaid)
    assert json.loads(verifier.asked[0]) == ARGUMENTS and verifier.keys == ["Bearer secret"]


def test_a_reward_model_is_asked_by_its_score_route(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_rewards, "AT_ONCE", 1)
    verifier.answer = lambda question: (
        200,
        {"id": "score-1", "data": [{"index": 0, "score": len(question["text_2"][0])}]},
    )
    assert http_reward(f"{verifier.url}/score", 20)(ARGUMENTS) == [1.0, 2.0]
    requests = [msgspec.json.decode(question, type=ScoreRequest) for question in verifier.asked]
    assert [request.pairs() for request in requests] == [[("1=", "a")], [("2=", "bb")]], "as our own server reads it"
    assert all(request.use_activation is False for request in requests) and verifier.keys == [None, None]
    with pytest.raises(ConfigError, match="scores texts"):
        http_reward(f"{verifier.url}/score", 20)({**ARGUMENTS, "prompts": [[{"role": "user", "content": "hi"}]] * 2})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, {"rewards": [1.0]}), "returned 1 reward for 2 completions"),
        ((200, {"rewards": ["much", 1.0]}), "answered with something else than rewards"),
        ((200, {"scores": [1.0, 1.0]}), "answered with something else than rewards"),
        ((200, b"no JSON"), "answered with something else than rewards"),
        ((200, {"rewards": [1.0, math.nan]}), "answered with NaN for a reward, which is no number"),
        ((200, {"rewards": [-math.inf, 1.0]}), "answered with -Infinity for a reward, which is no number"),
        ((200, {"data": [{"score": math.nan}]}), "answered with NaN for a reward, which is no number"),
        ((500, b"out of\nmemory"), "answered 500: out of"),
        ((401, b""), "answered 401: Unauthorized"),
    ],
)
def test_what_is_of_no_use_is_told_in_one_line(answer: tuple[int, Any], words: str, verifier: Verifier) -> None:
    verifier.answer = lambda question: answer
    with pytest.raises(ConfigError) as caught:
        http_reward(f"{verifier.url}/verify", 20)(ARGUMENTS)
    assert f"the server at {verifier.url}/verify {words}" in caught.value.message and caught.value.hint
    assert "\n" not in caught.value.message


def test_a_server_that_is_not_there_or_hangs_is_named(verifier: Verifier) -> None:
    held = threading.Event()
    verifier.answer = lambda question: (held.wait(20), (200, {"rewards": [1.0, 1.0]}))[1]
    with pytest.raises(
        ConfigError, match=f"the server at {verifier.url}/verify has not returned: .* have 0.2 s together"
    ):
        http_reward(f"{verifier.url}/verify", 0.2)(ARGUMENTS)
    held.set()
    with pytest.raises(ConfigError, match=r"cannot be asked: .*refused"):
        http_reward("http://127.0.0.1:9/verify", 20)(ARGUMENTS)


def test_time_in_which_this_process_stood_still_does_not_count(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it is suspended for an hour while the verifier is at work: of its own 0.2 s nothing has passed."""
    looks = chain([0.0], repeat(3600.0))
    monkeypatch.setattr(
        reward_functions, "Deadline", lambda seconds: Deadline(seconds, AwakeClock(clock=lambda: next(looks)))
    )
    verifier.answer = lambda question: (threading.Event().wait(1.0), (200, {"rewards": [1.0, 2.0]}))[1]
    assert http_reward(f"{verifier.url}/verify", 0.2)(ARGUMENTS) == [1.0, 2.0]


def test_a_verifier_on_this_machine_is_asked_without_a_proxy(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would look for it on its own machine, and see the key."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert http_reward(f"{verifier.url}/verify", 20)(ARGUMENTS)[0] == 1.0


def test_neither_question_nor_key_goes_where_a_server_points(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(http_rewards.KEY_VARIABLE, "secret")
    verifier.answer = lambda question: (302, b"") if question else (200, {"rewards": [1.0, 2.0]})
    with pytest.raises(ConfigError, match=f"the server at {verifier.url}/verify answered 302"):
        http_reward(f"{verifier.url}/verify", 20)(ARGUMENTS)
    assert verifier.paths == ["/verify"]
