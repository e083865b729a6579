"""A client that measures any OpenAI-compatible server: tokens per second of one request and of several at once."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx


@dataclass(frozen=True)
class Reply:
    """One streamed reply: the seconds from the request to each of its chunks, and its tokens."""

    arrivals: tuple[float, ...]
    tokens: int

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0]

    @property
    def last(self) -> float:
        return self.arrivals[-1]

    @property
    def gaps(self) -> list[float]:
        """Seconds from each chunk to the next one."""
        return [after - before for before, after in pairwise(self.arrivals)]


async def chunks_of(response: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a streamed reply; RuntimeError for one that tells of an error."""
    response.raise_for_status()
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(chunk["error"])
            yield chunk


async def ask(client: httpx.AsyncClient, url: str, model: str, prompt: list[int], max_tokens: int) -> Reply:
    body = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    start, arrivals, tokens = time.perf_counter(), list[float](), 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        async for chunk in chunks_of(response):
            if chunk["choices"]:
                arrivals.append(time.perf_counter() - start)
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    return Reply(tuple(arrivals), tokens)


def prompt_of(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(10, 32000) for _ in range(length)]


async def model_of(client: httpx.AsyncClient, url: str) -> str:
    """The name of the model that a server has, once it has answered a request that warms it up."""
    model = str((await client.get(f"{url}/v1/models")).json()["data"][0]["id"])
    await ask(client, url, model, prompt_of(64, 1000), 8)  # no prompt begins as another does
    return model


async def measure(
    url: str, repeats: int = 3, prompt: int = 128, reply: int = 64, first: int = 0
) -> dict[str, list[float]]:
    """Tokens per second of one request, of a prompt of 512, and of 8 requests (`prompt` + `reply` tokens) at once.

    Each is repeated, after a request that warms up. `first` is the number of the first repeat, from 0 to 9: each number
    has prompts of its own.
    """
    async with httpx.AsyncClient(timeout=600) as client:
        model = await model_of(client, url)
        out: dict[str, list[float]] = {"decode_tok_s": [], "prefill_tok_s": [], "eight_tok_s": []}
        for turn in range(first, first + repeats):
            one = await ask(client, url, model, prompt_of(128, 10 + turn), 64)
            out["decode_tok_s"].append((one.tokens - 1) / (one.last - one.first))
            long = await ask(client, url, model, prompt_of(512, 20 + turn), 1)
            out["prefill_tok_s"].append(512 / long.first)
            start = time.perf_counter()
            many = await asyncio.gather(
                *(ask(client, url, model, prompt_of(prompt, 100 * turn + i), reply) for i in range(8))
            )
            out["eight_tok_s"].append(sum(reply.tokens for reply in many) / (time.perf_counter() - start))
    return out


def wait_until_ready(url: str, process: subprocess.Popen[bytes], seconds: float = 240) -> None:
    """Wait until the server that `process` runs answers; TimeoutError where it does not, or ends."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/v1/models", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)  # the server is still starting
    raise TimeoutError(f"{url} did not answer within {seconds:g} s, or its process ended")
