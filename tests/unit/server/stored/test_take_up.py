"""Replies that are taken up by their ids, over every interface: to the byte what an undisturbed client gets.

The first client goes away after its first events; another one takes the reply up with the number of the last of them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, Literal

import httpx
import pytest

from tests.unit.server.kit import SAID, client, refusal, run, say, serve
from tllm.core.errors import ClusterError
from tllm.server.admission.token_bucket import RateLimits
from tllm.server.app import App
from tllm.server.stored.stream_store import LocalStreamStore
from tllm.spec.request import KeptReply, Request, SamplingParams, StreamRecord

KEYS = ("first-key", "second-key")
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60},
    "/v1/responses": {"input": "hi"},
}
PATHS = tuple(ASKED)


class Held(asyncio.Event):
    """What an engine waits for before it goes on, which tells that all it gave before has been taken."""

    is_waited_for = False

    async def wait(self) -> Literal[True]:
        self.is_waited_for = True
        return await super().wait()


class Asker:
    """A client of a server, which can go away in mid-stream."""

    def __init__(self, app: App, key: str = "") -> None:
        self.app, self.http = app, client(app)
        self.headers = {"authorization": f"Bearer {key}"} if key else {}

    async def begin(self, path: str, **more: Any) -> tuple[list[str], asyncio.Task[None]]:
        """Events of a stream as they come, and the task that reads it: cancelled, its client has gone away."""
        events: list[str] = []
        body = json.dumps({**ASKED[path], "stream": True, "store": True, **more}).encode()
        headers = [(b"host", b"localhost"), *((k.encode(), v.encode()) for k, v in self.headers.items())]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        scope |= {"http_version": "1.1", "scheme": "http", "raw_path": path.encode(), "server": ("localhost", 80)}
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if text := message.get("body", b"").decode():
                events.append(text)

        return events, asyncio.create_task(self.app(scope, receive, send))

    async def get(self, path: str, method: str = "GET", **headers: str) -> httpx.Response:
        return await self.http.request(method, path, headers={**self.headers, **headers})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.001)


def id_of(path: str, events: list[str]) -> str:
    found = re.search(r'"id":"((?:cmpl-|chatcmpl-|msg_|resp_)[0-9a-f]{32})"', "".join(events))
    assert found is not None, events
    return f"{path}/{found[1]}"


def text_of(response: dict[str, Any]) -> str:
    return str(response["output"][0]["content"][0]["text"])


def after(path: str, number: int) -> tuple[str, dict[str, str]]:
    """What is added to a reply's path to have the events after that one."""
    if path == "/v1/responses":
        return f"?stream=true&starting_after={number}", {}
    return "", {"last-event-id": str(number)}


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_whose_client_left_is_taken_up_where_it_broke(path: str) -> None:
    async def work() -> None:
        engine = say()
        engine.hold_after = 4
        asker = Asker(serve(engine))
        whole, undisturbed = await asker.begin(path)
        seen, leaving = await asker.begin(path)
        await until(lambda: len(seen) >= 3 and len(whole) >= 3)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        query, headers = after(path, len(seen) - 1)
        taking = asyncio.create_task(asker.get(id_of(path, seen) + query, **headers))
        await asyncio.sleep(0.01)
        assert not taking.done() and engine.running == 2 and not engine.cancelled
        engine.go_on.set()
        rest = (await taking).text
        await undisturbed
        again = await asker.get(id_of(path, whole), accept="text/event-stream")
        assert again.text == "".join(whole)
        own = re.compile(r"[0-9a-f]{32}|\d{10}")  # ids and times are each reply's own
        assert own.sub("", "".join(seen) + rest) == own.sub("", "".join(whole))
        assert len(engine.submitted) == 2, "nothing was computed twice"

    run(work())


@pytest.mark.parametrize("path", PATHS)
def test_from_every_event_on_the_rest_is_the_same(path: str) -> None:
    async def work() -> None:
        asker = Asker(serve(say()))
        events, reading = await asker.begin(path)
        await reading
        for number in range(len(events) - 1):
            query, headers = after(path, number)
            assert (await asker.get(id_of(path, events) + query, **headers)).text == "".join(events[number + 1 :])
        query, headers = after(path, len(events) - 1)
        assert (await asker.get(id_of(path, events) + query, **headers)).status_code == 204, "there is no more"
        query, headers = after(path, len(events))
        reply = await asker.get(id_of(path, events) + query, **headers)
        words = f"is {len(events)}, and the last event so far is {len(events) - 1}"
        assert reply.status_code == 400 and words in reply.json()["error"]["message"]

    run(work())


@pytest.mark.parametrize("path", PATHS)
def test_from_every_event_on_the_rest_of_a_reply_that_failed_is_the_same(path: str) -> None:
    """Those of the error too, though no output of the engine is behind them."""

    async def work() -> None:
        engine = say()
        engine.fail_after, engine.error = 4, ClusterError("lab-2 is gone")
        asker = Asker(serve(engine))
        events, reading = await asker.begin(path)
        await reading
        assert "lab-2 is gone" in "".join(events)
        whole = (await asker.get(id_of(path, events), accept="text/event-stream")).text
        assert whole == "".join(events)
        for number in range(whole.count("data: ") - 1):
            query, headers = after(path, number)
            rest = (await asker.get(id_of(path, events) + query, **headers)).text
            assert whole.endswith(rest) and rest.count("data: ") == whole.count("data: ") - 1 - number
        query, headers = after(path, whole.count("data: ") - 1)
        assert (await asker.get(id_of(path, events) + query, **headers)).status_code == 204, "there is no more"

    run(work())


def test_events_have_ids_only_where_they_can_be_named() -> None:
    async def work() -> None:
        asker = Asker(serve(say()))
        plain, reading = await asker.begin("/v1/chat/completions", store=False)
        await reading
        stored, reading = await asker.begin("/v1/chat/completions")
        await reading
        assert not any(event.startswith("id:") for event in plain)
        assert [event.split("\n")[0] for event in stored] == [f"id: {number}" for number in range(len(stored))]
        reply = await asker.get(id_of("/v1/chat/completions", plain))
        assert refusal(reply, 404)["code"] == "not_found"

    run(work())


def test_several_choices_with_stop_strings_and_values_are_the_same_again() -> None:
    async def work() -> None:
        engine = say()
        engine.hold_after = 3
        asker = Asker(serve(engine))
        more = {"n": 3, "stop": ["how"], "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
        events, reading = await asker.begin("/v1/chat/completions", **more)
        await until(lambda: len(events) > 3)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        engine.go_on.set()
        await until(lambda: engine.running == 0)
        assert len(engine.cancelled) == 3, "nobody read it, and yet it ended at the stop string"
        path = id_of("/v1/chat/completions", events)
        first, second = [(await asker.get(path + "?stream=true")).text for _ in range(2)]
        assert first == second and first.startswith("".join(events))
        whole = (await asker.get(path)).json()
        assert [choice["message"]["content"] for choice in whole["choices"]] == [" hello world\n\n"] * 3
        assert whole["usage"] == json.loads(first.split("data: ")[-2].split("\n")[0])["usage"]

    run(work())


def test_a_client_that_did_not_ask_for_it_cancels_by_going_away() -> None:
    async def work() -> None:
        engine = say()
        engine.hold_after = 2
        asker = Asker(serve(engine))
        events, reading = await asker.begin("/v1/chat/completions", store=None)
        await until(lambda: len(events) >= 2)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert len(engine.cancelled) == 1 and engine.running == 0

    run(work())


def test_a_response_in_the_background_is_polled_cancelled_and_deleted() -> None:
    async def work() -> None:
        engine, held = say(), Held()
        engine.hold_after, engine.go_on = 4, held
        asker = Asker(serve(engine))
        body = {"input": "hi", "background": True}
        begun = (await asker.http.post("/v1/responses", json=body)).json()
        assert (begun["status"], begun["background"], begun["store"]) == ("in_progress", True, True)
        path = f"/v1/responses/{begun['id']}"
        await until(lambda: held.is_waited_for)
        so_far = (await asker.get(path)).json()
        assert so_far["status"] == "in_progress" and so_far["output"][0]["status"] == "in_progress"
        assert SAID.startswith(text_of(so_far)) and text_of(so_far)
        cancelled = (await asker.get(f"{path}/cancel", "POST")).json()
        assert cancelled["status"] == "cancelled" and len(engine.cancelled) == 1
        assert cancelled["output"][0]["status"] == "incomplete" and text_of(cancelled) == text_of(so_far)
        assert (await asker.get(f"{path}/cancel", "POST")).json() == (await asker.get(path)).json() == cancelled
        events = (await asker.get(path + "?stream=true")).text
        assert events.split("\n\n")[-2].startswith("event: response.cancelled\n")
        deleted = (await asker.get(path, "DELETE")).json()
        assert deleted == {"id": begun["id"], "object": "response", "deleted": True}
        assert refusal(await asker.get(path), 404)["param"] == "id"
        whole = (await asker.http.post("/v1/responses", json={**body, "stream": False, "store": True})).json()
        engine.go_on.set()
        await until(lambda: engine.running == 0)
        done = (await asker.get(f"/v1/responses/{whole['id']}")).json()
        assert done["status"] == "completed" and done["output"][0]["content"][0]["text"]

    run(work())


def test_a_kept_reply_that_is_cancelled_before_its_first_token_costs_what_was_computed() -> None:
    """And what only says how much that is is not kept, nor read by whoever takes the reply up."""

    async def work() -> None:
        engine, held = say(), Held()
        engine.computed, engine.hold_after, engine.go_on = 2, 0, held
        app = serve(engine)
        asker = Asker(app)
        begun = (await asker.http.post("/v1/responses", json={"input": "hi", "background": True})).json()
        path = f"/v1/responses/{begun['id']}"
        await until(lambda: held.is_waited_for)
        assert (await asker.get(path)).json()["output"] == []
        assert (await asker.get(f"{path}/cancel", "POST")).json()["status"] == "cancelled"
        await until(lambda: app.router.in_hand == 0)
        shown = app.router.metrics.render({}).decode()
        told = [line.split()[-1] for line in shown.splitlines() if line.startswith("tllm_key_prompt_tokens_total")]
        assert told == ["2.0"]

    run(work())


def test_a_kept_reply_that_the_server_loses_before_its_first_token_costs_nothing() -> None:
    async def work() -> None:
        engine = say()
        engine.computed, engine.fail_after, engine.error = 2, 0, ClusterError("a node was lost")
        app = serve(engine, rate_limit=RateLimits(tokens_per_minute=600))
        asker = Asker(app)
        begun = await asker.http.post("/v1/responses", json={"input": "hi", "background": True})
        assert begun.status_code == 200
        await until(lambda: app.router.in_hand == 0 and engine.submitted != [])
        assert int(app.keys.anonymous.headers()["x-ratelimit-remaining-tokens"]) == 600
        assert "tllm_key_prompt_tokens_total{" not in app.router.metrics.render({}).decode()

    run(work())


def test_an_engine_that_fails_is_told_of_to_whoever_comes() -> None:
    async def work() -> None:
        engine = say()
        engine.fail_after, engine.error = 3, ClusterError("node lab-2 is gone")
        asker = Asker(serve(engine))
        for path in PATHS:
            events, reading = await asker.begin(path)
            await reading
            assert "node lab-2 is gone" in "".join(events[-2:])
            assert (await asker.get(id_of(path, events), accept="text/event-stream")).text == "".join(events)
        state = (await asker.get(id_of(path, events))).json()
        assert state["status"] == "failed" and state["error"]["message"].startswith("node lab-2 is gone")

    run(work())


def test_a_store_that_refuses_says_why_of_what_it_keeps_and_of_what_is_new() -> None:
    async def work() -> None:
        asker = Asker(serve(say()))
        assert isinstance(asker.app.store, LocalStreamStore)
        for path in PATHS:
            events, reading = await asker.begin(path)
            await reading
            asker.app.store.refuse(ClusterError("another machine coordinates"))
            kept = id_of(path, events)
            for reply in (await asker.get(kept), await asker.http.post(path, json=ASKED[path] | {"store": True})):
                assert (reply.status_code, reply.json()["error"]["message"]) == (503, "another machine coordinates")
            asker.app.store._refusal = None

    run(work())


def test_only_the_key_that_began_it_takes_it_up() -> None:
    async def work() -> None:
        app = serve(say(), api_keys=KEYS)
        events, reading = await Asker(app, KEYS[0]).begin("/v1/chat/completions")
        await reading
        path = id_of("/v1/chat/completions", events)
        assert (await Asker(app).get(path)).status_code == 401
        for method in ("GET", "DELETE"):
            assert (await Asker(app, KEYS[1]).get(path, method)).status_code == 404
        assert (await Asker(app, KEYS[0]).get(path)).status_code == 200

    run(work())


def test_ids_and_numbers_that_are_none() -> None:
    async def work() -> None:
        asker = Asker(serve(say()))
        for path in PATHS:
            reply = await asker.get(f"{path}/nothing")
            kind = reply.json()["error"]["type"]
            assert reply.status_code == 404 and kind == "not_found_error"
        assert (await asker.get("/v1/messages/nothing")).json()["type"] == "error", "in that interface's own shape"
        events, reading = await asker.begin("/v1/chat/completions")
        await reading
        path = id_of("/v1/chat/completions", events)
        for wrong in ("-1", "x", "1.5", "9" * 30):
            refused = refusal(await asker.get(path, **{"last-event-id": wrong}), 400)
            assert "no id of an event of ours" in refused["message"]
        assert "must be a whole number" in refusal(await asker.get(path + "?starting_after=x"), 400)["message"]
        other = path.replace("chatcmpl-", "resp_").replace("chat/completions", "responses")
        assert (await asker.get(other)).status_code == 404, "it is a chat"

    run(work())


def test_a_server_that_keeps_nothing() -> None:
    async def work() -> None:
        asker = Asker(serve(say(), keep_streams=0))
        refused = await asker.http.post("/v1/responses", json={"input": "hi", "background": True})
        assert "keeps no replies" in refusal(refused, 400)["message"]
        reply = (await asker.http.post("/v1/responses", json={"input": "hi", "store": True})).json()
        assert reply["store"] is False
        assert (await asker.get(f"/v1/responses/{reply['id']}")).status_code == 404

    run(work())


def test_what_runs_for_nobody_is_in_hand() -> None:
    async def work() -> None:
        engine = say()
        engine.hold_after = 1
        app = serve(engine, max_sequences=2)
        asker = Asker(app)
        body = {"input": "hi", "background": True}
        replies = [await asker.http.post("/v1/responses", json=body) for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200, 200, 429]
        assert app.router.in_hand == 2
        engine.go_on.set()
        await until(lambda: app.router.in_hand == 0)

    run(work())


def test_what_finds_no_room_runs_for_nobody_and_is_in_hand_no_more() -> None:
    async def work() -> None:
        engine = say()
        engine.hold_after = 1
        app = serve(engine, keep_streams_bytes=1)
        assert (await Asker(app).http.post(PATHS[0], json={"prompt": "hi", "store": True})).status_code == 429
        names, account = [f"cmpl-{digit * 32}" for digit in "ab"], app.keys.anonymous
        asked = [Request(id=name, prompt_ids=(5,), params=SamplingParams()) for name in names]
        records = [StreamRecord(id=name, body=b"x" * 4000, owner="", created=1) for name in names]
        assert isinstance(app.store, LocalStreamStore)
        app.store.restore(KeptReply(record=records[0], requests=(asked[0],)), account)
        await asyncio.sleep(0.01)
        await until(lambda: app.router.in_hand == 0)
        assert not engine.submitted

        app = serve(engine, keep_streams_bytes=8000)  # for one of them
        account = app.keys.anonymous
        both = zip(records, asked, strict=True)
        await asyncio.gather(*(app.store.open(record, [request], account) for record, request in both))
        assert await app.store.take_up(names[0], "") is None, "the second one took its place before it had begun"
        engine.go_on.set()
        await until(lambda: app.router.in_hand == 0)
        assert [request.id for request in engine.submitted] == names[1:]

    run(work())


@pytest.mark.usefixtures("full_buckets")
def test_a_reply_that_another_process_began_is_paid_for_where_it_goes_on() -> None:
    """Its key got back what was found in the cache, as if it had paid for the prompt."""

    async def work() -> None:
        engine = say()
        engine.cached = lambda request: [0] * 30
        app = serve(engine, rate_limit=RateLimits(tokens_per_minute=1000))
        account, name = app.keys.anonymous, f"cmpl-{'a' * 32}"
        asked = Request(id=name, prompt_ids=tuple(range(5, 45)), params=SamplingParams(max_tokens=4))
        record = StreamRecord(id=name, body=b"", owner="", created=1)
        with account.charged(1, 100, 0) as before:
            before.use(0, 0)
        assert isinstance(app.store, LocalStreamStore)
        app.store.restore(KeptReply(record=record, requests=(asked,)), account)
        await until(lambda: app.router.in_hand == 0)
        assert account.headers()["x-ratelimit-remaining-tokens"] == str(1000 - 100 - (40 - 30) - 4)

    run(work())


@pytest.mark.usefixtures("virtual_time")
def test_what_ended_is_forgotten_though_nobody_comes() -> None:
    async def work() -> None:
        app = serve(say(), keep_streams=60)
        assert isinstance(app.store, LocalStreamStore)
        streams = app.store.streams
        streams._clock = asyncio.get_running_loop().time
        _, reading = await Asker(app).begin("/v1/chat/completions")
        await reading
        await asyncio.sleep(59)
        assert streams.nbytes > 0
        await asyncio.sleep(2)
        assert streams.nbytes == 0

    run(work())


@pytest.mark.usefixtures("virtual_time")
def test_what_had_ended_elsewhere_is_forgotten_though_nobody_comes() -> None:
    """The process that began it is gone, and nothing of it runs in the one that keeps it now."""

    async def work() -> None:
        app = serve(say(), keep_streams=60)
        assert isinstance(app.store, LocalStreamStore)
        streams, name = app.store.streams, f"cmpl-{'a' * 32}"
        streams._clock = asyncio.get_running_loop().time
        record = StreamRecord(id=name, body=b"", owner="", created=1)
        asked = Request(id=name, prompt_ids=(5,), params=SamplingParams())
        app.store.restore(KeptReply(record=record, requests=(asked,), is_over=True), app.keys.anonymous)
        await asyncio.sleep(59)
        assert streams.nbytes > 0
        await asyncio.sleep(2)
        assert streams.nbytes == 0

    run(work())
