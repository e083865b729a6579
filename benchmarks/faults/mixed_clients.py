"""Clients that ask a server as people do: chats, calls of tools, long prompts, streams that are left, and bad requests.

A client's requests follow from its number, so that every server is asked the same. The server may be any that speaks
the OpenAI interface.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.serving.many_requests import percentile
from benchmarks.serving.openai_client import chunks_of

CLIENTS = 8
FIRST_SECONDS, NEXT_SECONDS = 2.0, 0.2
"""A reply is in time if its first token comes so soon, and its end as if each next one took so long, as people read."""

PERCENTS = (50, 95, 99)
REFUSALS = (400, 422)
TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Counts words",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
}
WORDS = (
    "def",
    "main",
    "self",
    "args",
    "return",
    "class",
    "file",
    "open",
    "read",
    "lines",
    "for",
    "each",
    "word",
    "in",
    "list",
)
REFUSED: tuple[Mapping[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "x"}], "n": 0},
    {"messages": [{"role": "user", "content": "x " * 9000}]},
    {"messages": [{"role": "user", "content": "x"}], "temperature": -1},
    {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema"}},
    {"messages": "x"},
)


@dataclass
class Seen:
    """What the clients saw of one kind of request: those answered as they should be, and of these those in time."""

    done: int = 0
    in_time: int = 0
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    next_s: list[float] = field(default_factory=list)
    """Of each streamed reply the mean time from one token to the next."""
    whole_s: list[float] = field(default_factory=list)

    def add(self, whole: float, tokens: int, first: float | None = None) -> None:
        """A whole reply; `first`: the seconds to its first token, where it was streamed."""
        self.done += 1
        self.tokens += tokens
        self.whole_s.append(whole)
        if first is not None:
            self.first_s.append(first)
            if tokens > 1:
                self.next_s.append((whole - first) / (tokens - 1))
        self.in_time += (first or 0) <= FIRST_SECONDS and whole <= FIRST_SECONDS + NEXT_SECONDS * tokens

    def figures(self) -> dict[str, Any]:
        """For JSON: the counts, and of each list of seconds those that 50, 95 and 99 of 100 do not exceed."""
        lists = {"first_s": self.first_s, "next_s": self.next_s, "whole_s": self.whole_s}
        return vars(self) | {name: spread_of(values) for name, values in lists.items()}


class Clients:
    """The clients of one server, which ask until a moment.

    They keep their connections, as people's do, unless a server is beside them that closes some that a request has just
    been sent to (llama.cpp's).
    """

    def __init__(self, url: str, model: str, keeps_connections: bool = True) -> None:
        self.faults: Counter[str] = Counter()
        self._limits = httpx.Limits(
            max_connections=CLIENTS, max_keepalive_connections=CLIENTS if keeps_connections else 0
        )
        self._url, self._model = f"{url}/v1/chat/completions", model
        self._kinds: dict[
            str, tuple[int, Callable[[httpx.AsyncClient, random.Random, Seen], Coroutine[Any, Any, None]]]
        ] = {
            "chat": (6, self._chat),
            "tools": (2, self._tool),
            "long prompt": (2, self._long),
            "left in mid-stream": (2, self._leave),
            "refused": (2, self._bad),
        }
        self.seen = {kind: Seen() for kind in self._kinds}

    async def ask_for(self, seconds: float) -> None:
        """All clients, until so many seconds have passed."""
        until = time.monotonic() + seconds
        async with httpx.AsyncClient(timeout=120, limits=self._limits) as http, asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._client(http, random.Random(number), until))

    async def rush(self, rounds: int) -> None:
        """Long prompts that come at the same moment: of all clients, of one less and so on, so many rounds of these.

        So batches get as many tokens of prompts as they ever have, and all that lie between.
        """
        chance = random.Random("rush")
        async with httpx.AsyncClient(timeout=120, limits=self._limits) as http:
            for asking in rounds * (*range(CLIENTS, 1, -1),):
                async with asyncio.TaskGroup() as group:
                    for _ in range(asking):
                        group.create_task(self._long(http, chance, self.seen["long prompt"]))

    async def _client(self, http: httpx.AsyncClient, chance: random.Random, until: float) -> None:
        names, weights = list(self._kinds), [weight for weight, _ in self._kinds.values()]
        while time.monotonic() < until:
            (name,) = chance.choices(names, weights)
            try:
                await self._kinds[name][1](http, chance, self.seen[name])
            except (httpx.HTTPError, RuntimeError) as error:
                self.faults[f"{name}: {type(error).__name__}: {error}".partition("\n")[0][:200]] += 1

    async def _chat(self, http: httpx.AsyncClient, chance: random.Random, seen: Seen) -> None:
        """Two turns, the second of which goes on from the first."""
        messages = [{"role": "user", "content": text_of(chance, 20)}]
        for _ in range(2):
            reply = await self._stream(http, {"messages": messages, "max_tokens": chance.randrange(8, 40)}, seen)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": text_of(chance, 6)}]

    async def _tool(self, http: httpx.AsyncClient, chance: random.Random, seen: Seen) -> None:
        body = {"messages": [{"role": "user", "content": text_of(chance, 12)}], "tools": [TOOL], "max_tokens": 64}
        begun = time.perf_counter()
        reply = await http.post(self._url, json=self._body(body, tool_choice="required"))
        reply.raise_for_status()
        found = reply.json()
        choice = found["choices"][0]
        if choice["finish_reason"] != "length" and not choice["message"].get("tool_calls"):
            raise RuntimeError(f"no call of a tool, {choice['finish_reason']}")
        seen.add(time.perf_counter() - begun, found["usage"]["completion_tokens"])

    async def _long(self, http: httpx.AsyncClient, chance: random.Random, seen: Seen) -> None:
        messages = [{"role": "user", "content": text_of(chance, 300)}]
        await self._stream(http, {"messages": messages, "max_tokens": 8}, seen)

    async def _leave(self, http: httpx.AsyncClient, chance: random.Random, seen: Seen) -> None:
        body = {"messages": [{"role": "user", "content": text_of(chance, 20)}], "max_tokens": 400}
        await self._stream(http, body, seen, leaves_after=chance.randrange(1, 6))

    async def _bad(self, http: httpx.AsyncClient, chance: random.Random, seen: Seen) -> None:
        begun = time.perf_counter()
        if chance.random() < 0.2:
            what, reply = "broken JSON", await http.post(self._url, content=b'{"messages": [')
        else:
            body = chance.choice(REFUSED)
            what = ", ".join(
                f"{key}: {value}"[:40] for key, value in body.items() if key != "messages" or len(body) < 2
            )
            reply = await http.post(self._url, json=self._body(body, max_tokens=8))
        if reply.status_code not in REFUSALS or "message" not in reply.json()["error"]:
            raise RuntimeError(f"{what} was answered {reply.status_code} and not refused")
        seen.add(time.perf_counter() - begun, 0)

    def _body(self, body: Mapping[str, Any], **more: object) -> dict[str, Any]:
        return {"model": self._model, "temperature": 0, **more, **body}

    async def _stream(
        self, http: httpx.AsyncClient, body: Mapping[str, Any], seen: Seen, leaves_after: int | None = None
    ) -> str:
        """The text of a streamed chat; RuntimeError where it ends without a reason to."""
        asked = self._body(body, stream=True, stream_options={"include_usage": True}, ignore_eos=True)
        begun, first, pieces, reason, tokens = time.perf_counter(), None, list[str](), None, 0
        async with http.stream("POST", self._url, json=asked) as reply, aclosing(chunks_of(reply)) as found:
            async for chunk in found:
                for choice in chunk["choices"]:
                    reason = choice["finish_reason"] or reason
                    if text := choice["delta"].get("content"):
                        pieces.append(text)
                        first = first or time.perf_counter() - begun
                if len(pieces) == leaves_after:
                    seen.done += 1
                    seen.first_s.append(first or 0.0)
                    return "".join(pieces)
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        if reason is None:
            raise RuntimeError("a stream ended without a reason")
        seen.add(time.perf_counter() - begun, tokens, first)
        return "".join(pieces)


def text_of(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))


def spread_of(values: Sequence[float]) -> list[float]:
    """The values that 50, 95 and 99 of 100 do not exceed; nothing of none."""
    return [round(percentile(values, share), 4) for share in PERCENTS] if values else []


def percentiles(spread: Sequence[float], unit: float = 1.0) -> str:
    """A spread as the cell of a table, in `unit` seconds."""
    return " / ".join(f"{value / unit:.{2 if unit == 1 else 0}f}" for value in spread)
