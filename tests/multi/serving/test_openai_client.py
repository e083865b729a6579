"""The official `openai` client and raw sockets against a real server on loopback, over a fake engine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import openai
import pytest

from tests.support.serving.fake_engine import FakeEngine
from tests.support.steady_loop import HeldLoop
from tests.unit.server.kit import SAID, TEMPLATE, TOKENIZER, say
from tllm.core.errors import ClusterError, ConfigError
from tllm.server.app import App, build_app
from tllm.server.http import sse as stream_module
from tllm.server.http.settings import ServerSettings
from tllm.server.openai.engine_client import Health
from tllm.server.run import bind, serve_http


class Running:
    """A server in a thread of its own."""

    def __init__(self, engine: FakeEngine, **settings: Any) -> None:
        self.engine = engine
        self.url = ""
        self.app: App = build_app(engine, TOKENIZER, TEMPLATE, ServerSettings(port=0, **settings))
        self._ready = threading.Event()
        self._clients: list[openai.OpenAI] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._make_loop) as runner:
            runner.run(self._main())

    def _make_loop(self) -> HeldLoop:
        self.loop = HeldLoop()
        return self.loop

    async def _main(self) -> None:
        self.stop = asyncio.Event()
        await serve_http(self.app, on_ready=self._on_ready, stop=self.stop, signals=False)

    def _on_ready(self, url: str) -> None:
        self.url = url
        self._ready.set()

    def start(self) -> Running:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def ask_to_stop(self) -> None:
        self.loop.let_go()
        self.loop.call_soon_threadsafe(self.stop.set)

    def join(self, seconds: float = 60) -> bool:
        self._thread.join(seconds)
        for client in self._clients:
            client.close()
        return not self._thread.is_alive()

    def go_on(self) -> None:
        self.loop.call_soon_threadsafe(self.engine.go_on.set)

    def client(self, key: str = "none", retries: int = 0, timeout: float = 60) -> openai.OpenAI:
        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=retries, timeout=timeout)
        self._clients.append(made)
        return made

    def socket(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=60)


@contextmanager
def running(engine: FakeEngine | None = None, **settings: Any) -> Iterator[Running]:
    server = Running(engine or say(), **settings).start()
    try:
        yield server
    finally:
        server.go_on()
        server.ask_to_stop()
        assert server.join(), "the server did not stop"


def eventually(done: Callable[[], bool], seconds: float = 60.0) -> float:
    start = time.monotonic()
    while not done():
        assert time.monotonic() - start < seconds, "it never happened"
        time.sleep(0.002)
    return time.monotonic() - start


def test_completions_and_chat_stream_and_not() -> None:
    with running() as server:
        client = server.client()
        assert [model.id for model in client.models.list()] == ["tiny"]
        whole = client.completions.create(model="tiny", prompt="the dog", max_tokens=50, seed=3)
        assert whole.choices[0].text == SAID
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 3
        assert server.engine.submitted[-1].params.seed == 3
        parts = list(client.completions.create(model="tiny", prompt="the dog", max_tokens=50, stream=True))
        assert "".join(part.choices[0].text for part in parts) == SAID
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        chat = client.chat.completions.create(model="tiny", messages=messages)
        assert chat.choices[0].message.content == SAID
        assert chat.choices[0].finish_reason == "stop"
        stream = client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SAID
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(TOKENIZER.encode(SAID, add_special_tokens=False)) + 1


def test_n_logprobs_echo_and_stop_parse_as_the_client_expects() -> None:
    with running() as server:
        client = server.client()
        reply = client.completions.create(
            model="tiny", prompt=[[4, 6], [5, 7, 9]], n=2, echo=True, logprobs=2, max_tokens=2, seed=9, stop=["xyz"]
        )
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
        assert [request.params.seed for request in server.engine.submitted] == [9, 10, 9, 10]
        worth = reply.choices[2].logprobs
        assert worth is not None
        assert worth.token_logprobs is not None
        assert worth.token_logprobs[0] is None
        assert len(worth.token_logprobs) == 5
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        chat = client.chat.completions.create(
            model="tiny", messages=messages, logprobs=True, top_logprobs=3, max_completion_tokens=2
        )
        assert chat.choices[0].finish_reason == "length"
        content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
        assert content is not None
        assert [len(one.top_logprobs) for one in content] == [3, 3]
        assert bytes(content[0].bytes or []).decode() == content[0].token


def test_errors_become_the_clients_own() -> None:
    with running(api_keys=("right-key-1",), model_aliases=("also",)) as server:
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong-key").models.list()
        client = server.client("right-key-1")
        assert [model.id for model in client.models.list()] == ["tiny", "also"]
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="gpt-4", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="tiny", prompt="x", max_tokens=10**6)
        assert bad.value.param == "max_tokens"
        assert bad.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tiny", prompt="x", suffix="y")
        assert refused.value.param == "suffix"
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_error_in_a_stream_reaches_the_client() -> None:
    engine = say()
    engine.error, engine.fail_after = ClusterError("node b went away"), 2
    with running(engine) as server:
        stream = server.client().completions.create(model="tiny", prompt="x", stream=True)
        got = [next(stream).choices[0].text for _ in range(2)]
        assert got == [" hello", " world"]
        with pytest.raises(openai.APIError, match="node b"):
            next(stream)


def test_who_is_waited_for_is_told_in_comments_that_the_client_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same request twice, by the official client and raw, through one stall."""
    monkeypatch.setattr(stream_module, "REASON_AFTER_SECONDS", 0.05)
    engine = say()
    engine.hold_after = 2
    with running(engine) as server, httpx.Client(timeout=60) as raw:
        client = server.client()
        body: dict[str, Any] = {"model": "tiny", "prompt": "x", "stream": True}
        parts = client.completions.create(**body, max_tokens=50)
        assert [next(parts).choices[0].text for _ in range(2)] == [" hello", " world"]
        with raw.stream("POST", f"{server.url}/v1/completions", json={**body, "max_tokens": 50}) as answer:
            lines = answer.iter_lines()
            engine.well = Health(running=2, node="b", reason="node b (rank 1, layers [3, 6)) has been silent for 2.0 s")
            said = next(line for line in lines if line.startswith(":"))
            stalled = raw.get(f"{server.url}/health/progress")
            assert (stalled.status_code, said) == (503, f": {stalled.json()['error']['message']}")
            server.go_on()
            rest = [line for line in lines if line.startswith("data: ")]
        assert "".join(part.choices[0].text for part in parts) == SAID.removeprefix(" hello world")
        assert rest[-1] == "data: [DONE]"


@pytest.mark.parametrize("hold", [0, 2])
def test_closing_a_stream_cancels_the_request(hold: int) -> None:
    engine = say()
    engine.hold_after = hold
    with running(engine, keep_alive_seconds=0.05) as server:
        stream = server.client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        if hold:
            assert next(iter(stream)).choices[0].delta.content == " hello"
        eventually(lambda: engine.running == 1)
        stream.response.close()
        eventually(lambda: engine.running == 0)
        assert len(engine.cancelled) == 1
        assert server.app.router.in_hand == 0


def test_a_client_that_gives_up_waiting_cancels_a_whole_reply_too() -> None:
    engine = say()
    engine.hold_after = 1
    with running(engine) as server:
        for seconds in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0):  # a busy machine may not even ask within the first
            asked = len(engine.submitted)
            with pytest.raises(openai.APITimeoutError):
                server.client(timeout=seconds).completions.create(model="tiny", prompt="x", n=2)
            eventually(lambda: engine.running == 0 and not server.app.router.in_hand)
            if len(engine.submitted) == asked + 2:
                break
        assert len(engine.cancelled) == len(engine.submitted) >= 2


def test_a_crowd_is_served_and_the_rest_told_to_come_again() -> None:
    engine = say()
    engine.delay = 0.002
    with running(engine, max_sequences=8) as server:
        answers: list[str] = []

        def one() -> None:
            try:
                client = server.client(retries=8)
                answers.append(client.completions.create(model="tiny", prompt="x", max_tokens=50).choices[0].text)
            except openai.RateLimitError:
                answers.append("busy")

        threads = [threading.Thread(target=one) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
        assert answers.count(SAID) + answers.count("busy") == 24
        assert answers.count(SAID) >= 8
        assert engine.running == 0


def raw(server: Running, data: bytes, seconds: float = 60.0) -> bytes:
    """Send bytes, read until the server closes."""
    with server.socket() as wire:
        wire.settimeout(seconds)
        got = b""
        try:
            wire.sendall(data)
            while part := wire.recv(65536):
                got += part
        except (ConnectionResetError, BrokenPipeError):
            pass
        return got


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: evil\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: nine\r\n\r\n",
    ],
)
def test_broken_heads_are_refused_in_the_same_shape(data: bytes) -> None:
    with running() as server:
        got = raw(server, data)
        head, _, body = got.partition(b"\r\n\r\n")
        if body.endswith(b"}}"):  # else a reset overtook the answer, as we were still sending
            assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
            assert json.loads(body)["error"]["code"] == "bad_http"
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_path_is_not_tidied_up_to_get_round_the_key() -> None:
    with running(api_keys=("right-key-1",)) as server:
        for path in (b"/v1/../health", b"/health/../v1/models", b"/%68ealth/../metrics", b"/health%2f..%2fv1/models"):
            got = raw(server, b"GET " + path + b" HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            assert got.startswith((b"HTTP/1.1 401", b"HTTP/1.1 404")), got


def test_slow_heads_are_cut_off_and_do_not_block_others() -> None:
    with running(header_seconds=30, body_seconds=30) as server, ExitStack() as stack:
        server.loop.hold()
        silent, slow, again, body = (stack.enter_context(server.socket()) for _ in range(4))
        slow.sendall(b"GET /health HT")
        again.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        reply = b""
        while not reply.endswith(b"}"):
            reply += again.recv(4096)
        assert reply.startswith(b"HTTP/1.1 200")
        again.sendall(b"GET /heal")
        body.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\n{")
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.loop.pass_seconds(31)
        assert silent.recv(10) == b""
        assert slow.recv(10) == b""
        assert again.recv(10) == b""
        assert body.recv(65536).startswith(b"HTTP/1.1 408")


def test_a_large_body_gets_its_answer() -> None:
    with running() as server:
        reply = httpx.post(f"{server.url}/v1/completions", content=b"x" * (20 << 20), timeout=60)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "body_too_large"


def test_a_busy_port_is_a_config_error() -> None:
    with running() as server:
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=str(port)) as caught:
            bind("127.0.0.1", port)
        assert "--port" in caught.value.hint
    with pytest.raises(ConfigError):
        bind("no.such.host.invalid", 0)
    with pytest.raises(ConfigError):
        bind("192.0.2.1", 0)


def test_a_drain_lets_requests_finish_and_takes_no_new_ones() -> None:
    engine = say()
    engine.hold_after = 2
    server = Running(engine, drain_seconds=10).start()
    client = server.client()
    stream = iter(client.completions.create(model="tiny", prompt="x", stream=True))
    assert next(stream).choices[0].text == " hello"
    server.ask_to_stop()
    eventually(lambda: server.app.router.draining)
    with pytest.raises(openai.InternalServerError) as refused:
        client.completions.create(model="tiny", prompt="x")
    assert refused.value.status_code == 503
    assert refused.value.response.headers["retry-after"]
    server.go_on()
    assert "".join(part.choices[0].text for part in stream).startswith(" world")
    assert server.join()
    assert engine.cancelled == []


def test_a_whole_reply_cut_off_by_the_end_is_503() -> None:
    engine = say()
    engine.hold_after = 1
    server = Running(engine, drain_seconds=0.2).start()

    def stop_in_mid_reply() -> None:
        eventually(lambda: engine.running == 1)
        server.ask_to_stop()

    stopping = threading.Thread(target=stop_in_mid_reply)
    stopping.start()
    with pytest.raises(openai.InternalServerError) as refused:
        server.client().completions.create(model="tiny", prompt="x")
    stopping.join()
    assert refused.value.code == "draining"
    assert server.join()
    assert engine.running == 0


def test_a_drain_ends_after_its_time() -> None:
    engine = say()
    engine.hold_after = 1
    server = Running(engine, drain_seconds=0.2).start()
    stream = server.client().completions.create(model="tiny", prompt="x", stream=True)
    assert next(iter(stream)).choices[0].text == " hello"
    server.ask_to_stop()
    assert server.join()
    assert engine.running == 0
    assert len(engine.cancelled) == 1
