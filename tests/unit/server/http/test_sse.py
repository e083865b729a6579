"""Streams and clients that leave: comments while it is quiet, errors as events, work that stops at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tests.support.serving.fake_engine import FakeEngine
from tests.unit.server.kit import client, post, run, say, serve
from tllm.core.errors import ClusterError
from tllm.server.app import App
from tllm.server.http import sse as stream_module
from tllm.server.openai.engine_client import Health
from tllm.spec.request import Output, Request

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 10}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10}


def test_an_error_inside_a_stream_is_an_event_and_the_stream_still_ends() -> None:
    for count in (1, 2):
        engine = say()
        engine.error, engine.fail_after = ClusterError("node b went away"), 2
        response = post(serve(engine), "/v1/completions", {**BODY, "stream": True, "n": count})
        assert response.status_code == 200
        events = response.text.strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert error["code"] == "node_lost"
        assert "node b" in error["message"]
        assert engine.running == 0


def test_comments_while_nothing_comes() -> None:
    async def work() -> str:
        engine = say()
        engine.hold_after = 0
        app = serve(engine, keep_alive_seconds=0.05)
        talk = _Talk(app, "/v1/completions", {**BODY, "stream": True})
        await talk.until(lambda: talk.body().count(b": keep-alive\n\n") >= 2)
        assert b"data" not in talk.body()
        engine.go_on.set()
        await talk.finished()
        return talk.body().decode()

    text = run(work())
    assert text.endswith("data: [DONE]\n\n")
    assert " hello" in text


def test_no_comments_where_the_time_for_them_is_nought(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> bytes:
        engine = say()
        engine.hold_after = 0
        asked = asyncio.Event()
        monkeypatch.setattr(stream_module, "POLL_SECONDS", 0.001)
        comment = stream_module.EventStream._comment

        async def told(stream: stream_module.EventStream, event: asyncio.Future[bytes]) -> bytes:
            asyncio.get_running_loop().call_later(0.02, asked.set)
            return await comment(stream, event)

        monkeypatch.setattr(stream_module.EventStream, "_comment", told)
        talk = _Talk(serve(engine, keep_alive_seconds=0), "/v1/completions", {**BODY, "stream": True})
        await asked.wait()
        engine.go_on.set()
        await talk.finished()
        return talk.body()

    text = run(work())
    assert text.endswith(b"data: [DONE]\n\n") and b"keep-alive" not in text


LATE = Health(running=1, node="b", reason="node b (rank 1, layers [3, 6))\nhas been silent for 2.4 s")
STUCK = Health(running=1, seconds_since_step=100.0, waits_for="c")


@pytest.mark.parametrize("hold", [0, 2])
@pytest.mark.parametrize(("health", "who"), [(LATE, b"node b (rank 1"), (STUCK, b"for node c")])
def test_a_stream_that_waits_for_a_node_says_for_which(
    health: Health, who: bytes, hold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of /health/progress, on one line, again and again, and no more once all is well."""
    for name in ("POLL_SECONDS", "REASON_AFTER_SECONDS", "REASON_AGAIN_SECONDS"):
        monkeypatch.setattr(stream_module, name, getattr(stream_module, name) / 20)

    async def work() -> str:
        engine = say()
        engine.hold_after = hold
        app = serve(engine, stall_seconds=50.0)
        talk = _Talk(app, "/v1/completions", {**BODY, "stream": True})
        await talk.until(lambda: engine.running)
        await asyncio.sleep(4 * stream_module.REASON_AFTER_SECONDS)
        assert who not in talk.body()
        engine.well = health
        await talk.until(lambda: talk.body().count(who) >= 2)
        async with client(app) as http:
            said = (await http.get("/health/progress")).json()["error"]["message"]
        assert f"\n: {' '.join(said.split())}\n\n" in "\n" + talk.body().decode()
        engine.well = Health()
        count = talk.body().count(who)
        await asyncio.sleep(3 * stream_module.REASON_AGAIN_SECONDS)
        assert talk.body().count(who) <= count + 1
        engine.go_on.set()
        await talk.finished()
        return talk.body().decode()

    undisturbed = post(serve(say()), "/v1/completions", {**BODY, "stream": True}).text
    assert _texts(run(work())) == _texts(undisturbed) != ""


def test_who_is_waited_for_is_said_again_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("POLL_SECONDS", 0.01), ("REASON_AFTER_SECONDS", 0.0), ("REASON_AGAIN_SECONDS", 1000.0)):
        monkeypatch.setattr(stream_module, name, seconds)

    async def work() -> bytes:
        engine = say()
        engine.hold_after, engine.well = 1, LATE
        talk = _Talk(serve(engine, keep_alive_seconds=0.05), "/v1/completions", {**BODY, "stream": True})
        await talk.until(lambda: talk.body().count(b": keep-alive") >= 3)
        engine.go_on.set()
        await talk.finished()
        return talk.body()

    assert run(work()).count(b"the sequence in hand does not move") == 1


def test_an_error_after_the_first_comment_is_an_event() -> None:
    async def work() -> _Talk:
        engine = say()

        async def fails(request: Request) -> AsyncGenerator[Output, None]:
            await engine.go_on.wait()
            raise ClusterError("gone")
            yield

        engine.submit = fails  # type: ignore[method-assign]
        talk = _Talk(serve(engine, keep_alive_seconds=0.05), "/v1/completions", {**BODY, "stream": True})
        await talk.until(lambda: b": keep-alive" in talk.body())
        engine.go_on.set()
        await talk.finished()
        return talk

    talk = run(work())
    assert talk.status() == 200
    assert b'"node_lost"' in talk.body()
    assert talk.body().endswith(b"data: [DONE]\n\n")


def _texts(body: str) -> str:
    """The text of a stream that ends as it must, comments left out."""
    events = [event for event in body.split("\n\n") if event and not event.startswith(":")]
    assert events[-1] == "data: [DONE]"
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-1])


class _Talk:
    """One request spoken in ASGI by hand, so that the client can leave at any moment."""

    def __init__(self, app: App, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self._in: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._in.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1")],
            "scheme": "http",
            "server": ("127.0.0.1", 80),
            "http_version": "1.1",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }
        self.task = asyncio.create_task(app(scope, self._in.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    def status(self) -> int:
        return int(self.sent[0]["status"])

    def leave(self) -> None:
        self._in.put_nowait({"type": "http.disconnect"})

    async def until(self, done: Any) -> None:
        async with asyncio.timeout(30):
            while not done():
                await asyncio.sleep(0.001)

    async def finished(self) -> None:
        async with asyncio.timeout(30):
            await self.task


@pytest.mark.parametrize("hold", [0, 1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_stops_the_engine(
    path: str, body: dict[str, Any], stream: bool, hold: int, n: int
) -> None:
    async def work() -> tuple[FakeEngine, App]:
        engine = say()
        engine.hold_after = hold
        app = serve(engine)
        talk = _Talk(app, path, {**body, "stream": stream, "n": n})
        await talk.until(lambda: engine.running == n)
        await asyncio.sleep(0.02)
        talk.leave()
        await talk.finished()
        return engine, app

    engine, app = run(work())
    assert engine.running == 0
    assert len(engine.cancelled) == n
    assert app.router.in_hand == 0


def test_many_streams_left_at_random_leave_nothing_behind() -> None:
    async def work() -> tuple[FakeEngine, App]:
        engine = say()
        engine.delay = 0.001
        app = serve(engine)
        for _ in range(4):
            talks = [_Talk(app, "/v1/completions", {**BODY, "stream": i % 2 == 0}) for i in range(50)]
            for place, talk in enumerate(talks):
                await asyncio.sleep(0.0003 * (place % 5))
                talk.leave()
            await asyncio.gather(*(talk.finished() for talk in talks))
        await talk.until(lambda: len(asyncio.all_tasks()) == 1)
        return engine, app

    engine, app = run(work())
    assert engine.running == 0
    assert app.router.in_hand == 0


def test_a_request_beyond_its_deadline_is_504_and_stops() -> None:
    async def work() -> tuple[FakeEngine, _Talk]:
        engine = say()
        engine.hold_after = 0
        talk = _Talk(serve(engine, request_seconds=0.1), "/v1/completions", BODY)
        await talk.finished()
        return engine, talk

    engine, talk = run(work())
    assert talk.status() == 504
    assert b'"deadline"' in talk.body()
    assert engine.running == 0


def test_a_server_that_is_stopped_stops_its_requests() -> None:
    async def work() -> FakeEngine:
        engine = say()
        engine.hold_after = 1
        talk = _Talk(serve(engine), "/v1/completions", {**BODY, "stream": True})
        await talk.until(lambda: b"hello" in talk.body())
        talk.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await talk.task
        return engine

    assert run(work()).running == 0


def test_tokens_come_as_they_are_made() -> None:
    async def work() -> None:
        engine = say()
        engine.hold_after = 1
        talk = _Talk(serve(engine), "/v1/completions", {**BODY, "stream": True})
        await talk.until(lambda: b'" hello"' in talk.body())
        assert b"world" not in talk.body()
        engine.go_on.set()
        await talk.finished()
        assert b"world" in talk.body()

    run(work())
