"""HTTP at every node of a cluster, and replies that outlive the server that they were begun at.

They are taken up at another one, token for token the same."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.cluster.commands import EXACT, Running, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # starts four processes that load torch

TINY = Path(__file__).parents[3] / "models" / "tiny"
KEY = "key-of-this-test"
KEYS = {"authorization": f"Bearer {KEY}"}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me a long story."}],
    "temperature": 0,
    "max_tokens": 200,
    "ignore_eos": True,
    "stream": True,
}
STILL_SECONDS = 3.0
SHOWN = 6
"""Events that a client has before its server is killed."""


def events_of(lines: Iterator[str], most: int | None = None) -> str:
    """The text of a stream's events, of so many at most."""
    text, count = "", 0
    for line in lines:
        if line.startswith(":"):
            continue
        text += line + "\n"
        if line == "" and not text.endswith("\n\n\n"):
            count += 1
            if count == most:
                break
    return text


def read(url: str, method: str = "GET", body: Any = None, most: int | None = None, **headers: str) -> str:
    asked = httpx.stream(method, url, json=body, headers={**KEYS, **headers}, timeout=60)
    with asked as reply:
        assert reply.status_code == 200, reply.read()
        return events_of(reply.iter_lines(), most)


def text_of(events: str) -> str:
    lines = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines)


def rows(url: str) -> dict[str, float]:
    """Tokens that each rank has computed for replies so far, once the numbers have stopped moving for as long as six
    heartbeats take."""
    last: dict[str, float] = {}
    since = time.monotonic()
    while time.monotonic() - since < STILL_SECONDS:
        nodes = httpx.get(f"{url}/v1/cluster", headers=KEYS, timeout=60).json()["nodes"]
        now = {node["node"]: node["stats"]["reply_rows"] for node in nodes if node["rank"] is not None}
        if now != last:
            last, since = now, time.monotonic()
        time.sleep(0.1)
    return last


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)


def begun_response(url: str, most: int | None) -> tuple[str, list[Any]]:
    """A response in the background, as far as its client reads it; its id and its events."""
    with closing(client(url)) as asked:
        stream = asked.responses.create(
            model="tiny",
            input="Tell me a long story.",
            temperature=0,
            max_output_tokens=200,
            background=True,
            stream=True,
        )
        seen = list[Any]()
        with stream:
            for event in stream:
                seen.append(event)
                if len(seen) == most:
                    break
    return seen[0].response.id, seen


def taken_up(url: str, name: str, last: Any, most: int | None = None) -> list[Any]:
    """The events of a response after that one, so many at most."""
    with (
        closing(client(url)) as asked,
        asked.responses.retrieve(name, stream=True, starting_after=last.sequence_number) as stream,
    ):
        return list(islice(stream, most))


def numbers_and_texts(events: list[Any]) -> list[tuple[int, str, str]]:
    return [(event.sequence_number, event.type, getattr(event, "delta", "")) for event in events]


def joined(stack: ExitStack, line: Any, name: str) -> tuple[Running, str]:
    words = ["--token", line[2], "--name", name, "--threads", "1", "--serve", "--port", "0", "--api-key", KEY]
    node = stack.enter_context(running("join", line[1], *words))
    return node, name


def test_streams_outlive_the_servers_that_they_were_begun_at() -> None:
    with ExitStack() as stack:
        words = [
            "--nodes",
            "2",
            "--spare-nodes",
            "1",
            "--plan",
            "pp=2",
            *EXACT,
            "--threads",
            "1",
            "--cluster-host",
            "127.0.0.1",
            "--port",
            "0",
        ]
        server = stack.enter_context(running("serve", str(TINY), *words, "--api-key", KEY))
        line = server.until(r"tllm join (\S+) --token (\S+)")
        ranked, _ = joined(stack, line, "lab-2")
        first = server.until(r"serving tiny at (\S+)/v1")[1]
        second = ranked.until(r"serving tiny at (\S+)/v1")[1]
        idle, _ = joined(stack, line, "front")
        third = idle.until(r"serving tiny at (\S+)/v1")[1]

        every_node_answers(first, second, third)
        a_stream_is_taken_up_and_nothing_is_computed_twice(first, second, third, idle)
        a_stream_outlives_the_node_of_a_rank(first, second, ranked)
        a_node_that_leaves_lets_its_requests_end(stack, server, first)
        assert server.interrupt()[0] == 0


def every_node_answers(*urls: str) -> None:
    body = {"prompt": "x = ", "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    replies = [httpx.post(f"{url}/v1/completions", json=body, headers=KEYS, timeout=60).json() for url in urls]
    assert replies[0]["choices"][0]["token_ids"]
    assert all(reply["choices"] == replies[0]["choices"] for reply in replies)
    for path in ("/v1/models", "/tokenizer_info", "/version"):
        assert len({httpx.get(url + path, headers=KEYS, timeout=60).text for url in urls}) == 1
    for url in urls:
        assert httpx.get(f"{url}/health/ready", timeout=60).json() == {"status": "ready"}
        assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 401
        assert "vllm:num_requests_running" in httpx.get(f"{url}/metrics", headers=KEYS, timeout=60).text
        assert [node["node"] for node in httpx.get(f"{url}/v1/cluster", headers=KEYS, timeout=60).json()["nodes"]]


def a_stream_is_taken_up_and_nothing_is_computed_twice(first: str, second: str, third: str, node: Running) -> None:
    before = rows(first)
    undisturbed = text_of(read(f"{first}/v1/chat/completions", "POST", CHAT))
    once = rows(first)
    seen = read(f"{third}/v1/chat/completions", "POST", {**CHAT, "store": True}, SHOWN)
    node.process.send_signal(signal.SIGKILL)
    node.process.wait()
    name = json.loads(seen.splitlines()[1].removeprefix("data: "))["id"]
    path, last = f"/v1/chat/completions/{name}", seen.splitlines()[-3]
    assert last == f"id: {SHOWN - 1}", seen
    rest = read(second + path, **{"last-event-id": str(SHOWN - 1)})
    assert text_of(seen + rest) == undisturbed
    assert rest.endswith(f"id: {seen.count('id: ') + rest.count('id: ') - 1}\ndata: [DONE]\n\n")
    assert read(f"{first}{path}?stream=true") == seen + rest, "to the byte"
    with closing(client(second)) as asked:
        assert asked.chat.completions.retrieve(name).choices[0].message.content == undisturbed
        assert asked.chat.completions.delete(name).deleted
    assert httpx.get(first + path, headers=KEYS, timeout=60).status_code == 404
    assert httpx.get(first + path, timeout=60).status_code == 401
    twice = rows(first)
    assert {name: twice[name] - once[name] for name in twice} == {name: once[name] - before[name] for name in once}


def a_stream_outlives_the_node_of_a_rank(first: str, second: str, node: Running) -> None:
    _, undisturbed = begun_response(first, None)
    assert undisturbed[-1].type in ("response.incomplete", "response.completed")
    elsewhere, before = begun_response(first, SHOWN)
    before += taken_up(second, elsewhere, before[-1], SHOWN)
    name, seen = begun_response(second, SHOWN)
    node.process.send_signal(signal.SIGKILL)
    node.process.wait()
    whole = [*before, *taken_up(first, elsewhere, before[-1])]
    assert numbers_and_texts(whole) == numbers_and_texts(undisturbed)
    rest = taken_up(first, name, seen[-1])
    assert numbers_and_texts([*seen, *rest]) == numbers_and_texts(undisturbed)
    with closing(client(first)) as asked:
        assert rest[-1].response.output_text == undisturbed[-1].response.output_text
        assert asked.responses.retrieve(name) == rest[-1].response
        assert asked.responses.cancel(name).status == rest[-1].response.status, "it has ended"
        asked.responses.delete(name)
        with pytest.raises(openai.NotFoundError, match="there is no reply"):
            asked.responses.retrieve(name)


def a_node_that_leaves_lets_its_requests_end(stack: ExitStack, server: Running, first: str) -> None:
    """On SIGTERM, as the first machine does. It has no rank: the plan that is left is whole without it."""
    line = server.until(r"tllm join (\S+) --token (\S+)")
    node, _ = joined(stack, line, "leaves")
    url = node.until(r"serving tiny at (\S+)/v1")[1]
    undisturbed = text_of(read(f"{first}/v1/chat/completions", "POST", CHAT))
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT, headers=KEYS, timeout=60) as reply:
        lines = reply.iter_lines()
        seen = events_of(lines, SHOWN)
        node.process.send_signal(signal.SIGTERM)
        assert text_of(seen + events_of(lines)) == undisturbed
    code, said = node.wait()
    assert code == 0 and "Traceback" not in said
