"""Each limit in each interface: what has just so much is served, one more is refused with both numbers and a hint."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.serving.fake_engine import FakeEngine
from tests.unit.server.kit import TOKENIZER, client, run, say, serve
from tests.unit.server.test_tools import TEMPLATE
from tllm.core.errors import ClusterError
from tllm.server.admission.account import ApiKey
from tllm.server.admission.token_bucket import RateLimits
from tllm.server.app import App
from tllm.server.http.settings import RequestLimits
from tllm.spec.request import Output, Request

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@dataclass(frozen=True)
class Interface:
    """How one interface is asked, and where it has what is limited; None where it does not."""

    path: str
    body: dict[str, Any]
    stops: Callable[[list[str]], dict[str, Any]] | None = None
    messages: Callable[[int], dict[str, Any]] | None = None
    tools: Callable[[int], dict[str, Any]] | None = None
    has_openai_fields: bool = False


def openai_tools(count: int) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": f"f{i}", "parameters": SCHEMA}} for i in range(count)]}


def turns(count: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}] * count}


HELLO = [{"role": "user", "content": "hello"}]
INTERFACES = {
    "completions": Interface(
        "/v1/completions",
        {"model": "tiny", "prompt": "hello", "max_tokens": 4},
        stops=lambda stops: {"stop": stops},
        has_openai_fields=True,
    ),
    "chat": Interface(
        "/v1/chat/completions",
        {"model": "tiny", "messages": HELLO, "max_tokens": 4},
        stops=lambda stops: {"stop": stops},
        messages=turns,
        tools=openai_tools,
        has_openai_fields=True,
    ),
    "responses": Interface(
        "/v1/responses",
        {"model": "tiny", "input": "hello", "max_output_tokens": 4},
        messages=lambda count: {"input": turns(count)["messages"]},
        tools=lambda count: {
            "tools": [{"type": "function", "name": f"f{i}", "parameters": SCHEMA} for i in range(count)]
        },
    ),
    "messages": Interface(
        "/v1/messages",
        {"model": "tiny", "messages": HELLO, "max_tokens": 4},
        stops=lambda stops: {"stop_sequences": stops},
        messages=turns,
        tools=lambda count: {"tools": [{"name": f"f{i}", "input_schema": SCHEMA} for i in range(count)]},
    ),
    "ollama": Interface(
        "/api/chat",
        {"model": "tiny", "messages": HELLO, "stream": False, "options": {"num_predict": 4}},
        stops=lambda stops: {"options": {"num_predict": 4, "stop": stops}},
        messages=turns,
        tools=openai_tools,
    ),
}
FIELDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "max_n": lambda count: {"n": count},
    "max_stop_token_ids": lambda count: {"stop_token_ids": list(range(count))},
    "max_logit_bias": lambda count: {"logit_bias": {str(i): 1 for i in range(count)}},
}
"""Of OpenAI's completions and chats alone."""


def with_size(name: str, interface: Interface, size: int) -> dict[str, Any] | None:
    """What a body needs to have so much of what a limit is about; None where the interface has no such thing."""
    if name in FIELDS:
        return FIELDS[name](size) if interface.has_openai_fields else None
    if name == "max_stops":
        return interface.stops([f"s{i}" for i in range(size)]) if interface.stops else None
    if name == "max_stop_length":
        return interface.stops(["s" * size]) if interface.stops else None
    if name == "max_messages":
        return interface.messages(size) if interface.messages else None
    if name == "max_tools":
        return interface.tools(size) if interface.tools else None
    if name == "max_json_depth":  # the body itself is one deep; an unknown field is ignored
        return {"unknown": json.loads("[" * (size - 1) + "]" * (size - 1))}
    own = json.dumps(interface.body)
    if name == "max_json_containers":
        return {"unknown": [[]] * (size - 1 - own.count("[") - own.count("{"))}
    assert name == "max_body_bytes"
    return {"unknown": "x" * (size - len(json.dumps({**interface.body, "unknown": ""})))}


SIZES = {
    "max_body_bytes": 4000,
    "max_json_depth": 9,
    "max_json_containers": 30,
    "max_n": 3,
    "max_stops": 5,
    "max_stop_length": 11,
    "max_stop_token_ids": 6,
    "max_logit_bias": 7,
    "max_messages": 4,
    "max_tools": 2,
}
CASES = [
    (interface, name)
    for interface in INTERFACES
    for name, size in SIZES.items()
    if with_size(name, INTERFACES[interface], size) is not None
]


def over(engine: FakeEngine | None = None, **settings: Any) -> App:
    return serve(engine or say(" one two three"), template=TEMPLATE, **settings)


def send(app: App, interface: Interface, more: dict[str, Any], **headers: str) -> httpx.Response:
    async def work() -> httpx.Response:
        async with client(app) as http:
            content = json.dumps({**interface.body, **more})
            return await http.post(interface.path, content=content, headers=headers)

    return run(work())


def words(response: httpx.Response, path: str, status: int) -> str:
    """The message of an error, in the shape of its interface and no other."""
    assert response.status_code == status, response.text
    body = response.json()
    if path.startswith("/api/"):
        assert set(body) == {"error"} and isinstance(body["error"], str)
        return str(body["error"])
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error"} and set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


def has_numbers(text: str, *numbers: int) -> bool:
    return {str(number) for number in numbers} <= set(re.findall(r"\d+", text)) and "(" in text


@pytest.mark.parametrize(("interface", "name"), CASES)
def test_what_has_just_so_much_is_served_and_one_more_is_not(interface: str, name: str) -> None:
    asked, size = INTERFACES[interface], SIZES[name]
    engine = say(" one two three")
    app = over(engine, limits=RequestLimits(**{name: size}))
    most, more = with_size(name, asked, size), with_size(name, asked, size + 1)
    assert most is not None and more is not None
    served = send(app, asked, most)
    assert served.status_code == 200, served.text
    submitted = len(engine.submitted)
    text = words(send(app, asked, more), asked.path, 413 if name == "max_body_bytes" else 400)
    assert has_numbers(text, size, size + 1), text
    assert len(engine.submitted) == submitted, "the engine hears nothing of it"


def test_every_limit_of_a_request_is_tested() -> None:
    tested = {name for _, name in CASES} | {"max_input_tokens"}
    assert tested == set(RequestLimits.__dataclass_fields__)
    assert {name for name, _ in CASES} == set(INTERFACES)


@pytest.mark.parametrize("interface", INTERFACES)
def test_the_length_of_a_prompt(interface: str) -> None:
    asked, engine = INTERFACES[interface], say(" one")
    send(over(engine), asked, {})
    size = len(engine.submitted[0].prompt_ids)
    assert send(over(limits=RequestLimits(max_input_tokens=size)), asked, {}).status_code == 200
    text = words(send(over(limits=RequestLimits(max_input_tokens=size - 1)), asked, {}), asked.path, 400)
    assert has_numbers(text, size, size - 1), text


def test_best_of_is_limited_as_n_is() -> None:
    asked, app = INTERFACES["completions"], over(limits=RequestLimits(max_n=3))
    assert send(app, asked, {"n": 3, "best_of": 3}).status_code == 200
    assert has_numbers(words(send(app, asked, {"n": 3, "best_of": 4}), asked.path, 400), 3, 4)


def test_count_tokens_and_tokenize_have_the_limits_of_chats() -> None:
    app = over(limits=RequestLimits(max_messages=2))
    for path, body in (("/v1/messages/count_tokens", {"model": "tiny"}), ("/tokenize", {})):
        asked = Interface(path, body)
        assert send(app, asked, turns(2)).status_code == 200
        assert has_numbers(words(send(app, asked, turns(3)), path, 400), 2, 3)


@pytest.mark.parametrize("interface", INTERFACES)
def test_places_in_hand(interface: str) -> None:
    asked, engine = INTERFACES[interface], say(" one two three")
    engine.hold_after = 0
    app = over(engine, max_sequences=2)

    async def crowd() -> list[httpx.Response]:
        async with client(app) as http:
            held = [asyncio.create_task(http.post(asked.path, json=asked.body)) for _ in range(2)]
            while app.router.in_hand < 2:
                await asyncio.sleep(0.001)
            refused = await http.post(asked.path, json=asked.body)
            engine.go_on.set()
            return [refused, *(await asyncio.gather(*held))]

    refused, *held = run(crowd())
    assert [reply.status_code for reply in held] == [200, 200]
    text = words(refused, asked.path, 429)
    assert "2 sequences are in hand and 2 the most" in text and int(refused.headers["retry-after"]) >= 1


@pytest.mark.usefixtures("full_buckets")
@pytest.mark.parametrize("interface", INTERFACES)
def test_requests_and_tokens_of_a_key(interface: str) -> None:
    asked = INTERFACES[interface]
    app = over(rate_limit=RateLimits(requests_per_minute=2, max_concurrent=5, tokens_per_minute=10_000))
    first, second, third = (send(app, asked, {}) for _ in range(3))
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.headers["x-ratelimit-limit-requests"] == "2" and first.headers["x-ratelimit-limit-tokens"] == "10000"
    assert (first.headers["x-ratelimit-remaining-requests"], second.headers["x-ratelimit-remaining-requests"]) == (
        "1",
        "0",
    )
    assert re.fullmatch(r"(\d+m)?\d+(\.\d+)?m?s", second.headers["x-ratelimit-reset-requests"])
    assert has_numbers(words(third, asked.path, 429), 2)
    assert 1 <= int(third.headers["retry-after"]) <= 30
    assert 1 <= int(third.headers["retry-after-ms"]) <= 30_000
    left = int(second.headers["x-ratelimit-remaining-tokens"])
    assert 9500 < left < 10_000 and int(third.headers["x-ratelimit-remaining-tokens"]) >= left


@pytest.mark.usefixtures("full_buckets")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("interface", INTERFACES)
def test_a_reply_that_is_lost_costs_what_was_written_of_it(interface: str, stream: bool) -> None:
    engine = say()
    engine.fail_after, engine.error = 2, ClusterError("gone")
    app = over(engine, rate_limit=RateLimits(tokens_per_minute=100))
    assert send(app, INTERFACES[interface], {"stream": stream}).status_code == (200 if stream else 503)
    left = int(app.keys.anonymous.headers()["x-ratelimit-remaining-tokens"])
    assert left < 100 if stream else left == 100


@pytest.mark.usefixtures("virtual_time", "full_buckets")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("interface", INTERFACES)
def test_a_prompt_that_is_cancelled_costs_what_was_computed_of_it(interface: str, stream: bool) -> None:
    """Nothing is written before the first token, either: an error can still be an ordinary reply."""
    engine, asked = say(), INTERFACES[interface]
    send(over(engine), asked, {})
    size = len(engine.submitted.pop().prompt_ids)
    engine.computed, engine.hold_after = size - 1, 0
    app = over(engine, rate_limit=RateLimits(tokens_per_minute=2 * size), request_seconds=0.1)

    async def leave() -> None:
        async with client(app) as http:
            asking = asyncio.create_task(http.post(asked.path, json={**asked.body, "stream": stream}))
            while not engine.running:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.wait([asking])

    def left() -> int:
        return int(app.keys.anonymous.headers()["x-ratelimit-remaining-tokens"])

    def counted(name: str) -> list[float]:
        shown = app.router.metrics.render({}).decode()
        return [float(line.split()[-1]) for line in shown.splitlines() if line.startswith(f"{name}_total")]

    run(leave())
    assert engine.cancelled and left() == 2 * size - (size - 1)
    engine.go_on = asyncio.Event()
    app.keys.anonymous.change(ApiKey("anonymous", b""))  # with no limit any more
    assert send(app, asked, {"stream": stream}).status_code == 504, "it took too long"
    assert counted("tllm_key_prompt_tokens") == counted("vllm:prompt_tokens") == [2.0 * (size - 1)]
    engine.fail_after, engine.error, engine.hold_after = 0, ClusterError("gone"), None
    assert send(app, asked, {"stream": stream}).status_code == 503
    assert counted("tllm_key_prompt_tokens") == [2.0 * (size - 1)], "what the server lost costs nothing"


@pytest.mark.parametrize("interface", INTERFACES)
def test_a_prompt_of_more_tokens_than_a_minutes_is_never_taken(interface: str) -> None:
    asked, engine = INTERFACES[interface], say(" one")
    send(over(engine), asked, {})
    size = len(engine.submitted[0].prompt_ids)
    assert send(over(rate_limit=RateLimits(tokens_per_minute=size)), asked, {}).status_code == 200
    refused = send(over(rate_limit=RateLimits(tokens_per_minute=size - 1)), asked, {})
    text = words(refused, asked.path, 400)
    assert str(size) in text and str(size - 1) in text
    assert refused.headers["x-should-retry"] == "false"


class Impatient(FakeEngine):
    """Ends every request that may wait only so long as one that has not begun."""

    async def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        self.submitted.append(request)
        if request.scheduling.max_queue_seconds is not None:
            yield Output(request_id=request.id, finish_reason="expired")
            return
        async for output in super().submit(request):
            yield output


def impatient() -> Impatient:
    ids = TOKENIZER.encode(" one", add_special_tokens=False)
    return Impatient(lambda request: ids, TOKENIZER.eos_id or 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("interface", INTERFACES)
def test_a_request_that_cannot_begin_in_time_is_429(interface: str, stream: bool) -> None:
    asked = INTERFACES[interface]
    assert send(over(impatient()), asked, {}).status_code == 200
    refused = send(over(impatient(), max_queue_seconds=7.5), asked, {"stream": stream})
    assert "has not begun within 7.5 s" in words(refused, asked.path, 429)
    assert int(refused.headers["retry-after"]) >= 1
    engine = impatient()
    refused = send(over(engine), asked, {"stream": stream}, **{"x-max-queue-seconds": "0.25"})
    assert "has not begun within 0.25 s" in words(refused, asked.path, 429)
    assert engine.submitted[-1].scheduling.max_queue_seconds == 0.25
    for settings, header, seconds in (({"max_queue_seconds": 5.0}, "9", 5.0), ({"max_queue_seconds": 5.0}, "0", 0.0)):
        send(over(engine, **settings), asked, {}, **{"x-max-queue-seconds": header})
        assert engine.submitted[-1].scheduling.max_queue_seconds == seconds, "the server's own is the most"
    for wrong in ("soon", "-1", "1e9", ""):
        words(send(over(), asked, {}, **{"x-max-queue-seconds": wrong}), asked.path, 400)


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("interface", INTERFACES)
def test_a_request_that_takes_too_long_ends_with_one_clear_error(interface: str) -> None:
    asked = INTERFACES[interface]
    for hold_after in (0, 2):
        engine = say(" one two three")
        engine.hold_after = hold_after
        late = send(over(engine, request_seconds=0.2), asked, {"stream": False})
        assert "not finished after 0.2 s" in words(late, asked.path, 504)
        assert engine.cancelled == [engine.submitted[0].id] and engine.running == 0
    engine = say(" one two three")
    engine.hold_after = 2
    late = send(over(engine, request_seconds=0.2), asked, {"stream": True})
    # The Responses API has two events of it: `error`, and `response.failed` with the whole response.
    told = 2 if interface == "responses" else 1
    assert late.status_code == 200 and late.text.count("not finished after 0.2 s") == told
    assert engine.cancelled == [engine.submitted[0].id] and engine.running == 0


@pytest.mark.usefixtures("virtual_time")
def test_a_route_that_is_no_reply_is_cut_off_too() -> None:
    app = over(request_seconds=0.1)

    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    app._attended._app = never
    assert "not finished after 0.1 s" in words(send(app, INTERFACES["chat"], {}), "", 504)


def test_bodies_of_all_requests_together_are_limited() -> None:
    engine = say(" one two three")
    engine.hold_after = 0
    asked = INTERFACES["chat"]
    padded = {**asked.body, "unknown": "x" * 3000}
    app = over(engine, max_bodies_bytes=7000)

    async def crowd() -> tuple[httpx.Response, list[httpx.Response], httpx.Response]:
        async with client(app) as http:
            held = [asyncio.create_task(http.post(asked.path, json=padded)) for _ in range(2)]
            while app.router.in_hand < 2:
                await asyncio.sleep(0.001)
            refused = await http.post(asked.path, json=padded)
            engine.go_on.set()
            served = list(await asyncio.gather(*held))
            return refused, served, await http.post(asked.path, json=padded)

    refused, served, after = run(crowd())
    assert has_numbers(words(refused, asked.path, 503) + "(", 7000)
    assert [reply.status_code for reply in (*served, after)] == [200, 200, 200]


def test_priorities_are_heard_where_the_policy_says_so() -> None:
    asked, engine = INTERFACES["chat"], say(" one")
    text = words(send(over(engine), asked, {"priority": 3}), asked.path, 400)
    assert "priority is 3" in text and "--scheduling-policy priority" in text
    assert send(over(engine), asked, {"priority": 0}).status_code == 200
    for interface in ("completions", "chat", "responses"):
        send(over(engine, scheduling_policy="priority"), INTERFACES[interface], {"priority": -3})
        assert engine.submitted[-1].scheduling.priority == -3
