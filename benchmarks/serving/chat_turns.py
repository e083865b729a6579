"""Time to first token of the first and the second turn of a chat: `python -m benchmarks.serving.chat_turns`.

A server with random weights is asked over HTTP. The second prompt is the first one, its reply and a few tokens more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.models.random_llama import model_folder, parameters
from benchmarks.processes.python_module import free_port
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import Page, write
from benchmarks.serving.openai_client import chunks_of, prompt_of, wait_until_ready
from benchmarks.serving.throughput import server

PROMPT, REPLY, SAID = 3936, 32, 32
"""Tokens of the first prompt, of each reply, and of what is said in the second turn: 4,000 tokens come to be read."""

WAYS = {
    "one process": (),
    "one process, `--no-enable-prefix-caching`": ("--no-enable-prefix-caching",),
    "tp=2": ("--plan", "tp=2"),
    "pp=2": ("--plan", "pp=2"),
}


@dataclass(frozen=True)
class Turn:
    """Seconds to the first and from the first to the last token; tokens of the prompt that were found in the cache."""

    first: float
    rest: float
    cached: int


async def turn(client: httpx.AsyncClient, url: str, prompt: list[int]) -> tuple[Turn, list[int]]:
    """One turn, and the ids of its reply."""
    body = {
        "prompt": prompt, "max_tokens": REPLY, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    begun, times, ids, cached = time.perf_counter(), list[float](), list[int](), 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        async for chunk in chunks_of(response):
            for choice in chunk["choices"]:
                times.append(time.perf_counter() - begun)
                ids += choice["token_ids"]
            if chunk.get("usage"):
                cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Turn(times[0], times[-1] - times[0], cached), ids


async def chats(url: str, vocab: int, repeats: int) -> list[tuple[Turn, Turn]]:
    """The two turns of several chats, one after another, after a request that warms up."""
    found = []
    async with httpx.AsyncClient(timeout=600) as client:
        await turn(client, url, [token % vocab for token in prompt_of(256, 1000)])
        for chat in range(repeats):
            prompt = [token % vocab for token in prompt_of(PROMPT, chat)]
            one, reply = await turn(client, url, prompt)
            said = [token % vocab for token in prompt_of(SAID, 500 + chat)]
            two, _ = await turn(client, url, [*prompt, *reply, *said])
            found.append((one, two))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("30m", "0.3b", "1.1b"), default="30m")
    parser.add_argument("--folders", type=Path, default=Path("/tmp/tllm-bench"), help="where model folders are kept")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    folder = model_folder(options.size, options.folders)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    raw: dict[str, Any] = {"size": options.size, "ways": {}}
    for way, words in WAYS.items():
        print(way, flush=True)
        port = free_port()
        serve = [sys.executable, "-m", "tllm.cli", "serve", str(folder), "--threads", "1", "--quiet", *words]
        with server([*serve, "--port", str(port)], 1) as process:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process)
            found = asyncio.run(chats(url, vocab, options.repeats))
        raw["ways"][way] = [[asdict(one), asdict(two)] for one, two in found]
    write(page(raw), raw)


PURPOSE = """How much sooner does the second turn of a chat begin, because the server keeps what it computed for the
first? Model: {parameters} with random weights in bfloat16. The first prompt has 3,936 tokens and its reply 32. The
second prompt is both of them and 32 tokens more: 4,000 tokens. One thread for each rank."""
READING = """Seconds from the request to its first token, over HTTP, median of {chats} chats. Share: the second turn's
over the first turn's. Found: tokens of the second prompt that were not computed. That is every full page of 16 tokens
of the first turn; the last token of its reply was never computed. With the prefix cache the second turn takes
{least} to {most} of the first one's time to first token; the aim is under a twentieth."""
LIMITS = """- One chat at a time, in a cache with room for it; what many chats leave to each other is not measured.
- A small model with random weights: with a larger one the first turn takes longer, and the fixed costs of a request
weigh less.
- Nothing is kept over a restart of the server, or over the loss of a node.
- The first turns of one process are the same work with and without the option. In this run one median is
{noise} above the other: the machine was busy with other things."""


def page(raw: dict[str, Any]) -> Page:
    """The page of raw figures: for each way the two turns of every chat."""
    rows = [["server", "first turn, ms", "second turn, ms", "share", "found"]]
    shares, firsts, chats = list[float](), list[float](), 0
    for way, found in raw["ways"].items():
        one, two = (statistics.median(turns[at]["first"] for turns in found) for at in (0, 1))
        cached = statistics.median(turns[1]["cached"] for turns in found)
        rows.append([way, f"{1e3 * one:.0f}", f"{1e3 * two:.1f}", percent(two / one), f"{cached:.0f}"])
        chats = len(found)
        firsts.append(one)
        if cached:
            shares.append(two / one)
    purpose = PURPOSE.format(parameters=parameters(raw["size"]))
    reading = READING.format(chats=chats, least=percent(min(shares)), most=percent(max(shares)))
    alike = firsts[: len([way for way in WAYS if way.startswith("one process")])]
    limits = LIMITS.format(noise=percent(max(alike) / min(alike) - 1))
    return Page("serving", "chat-turns", "Serving: the second turn of a chat", purpose, table(rows), reading, limits)


if __name__ == "__main__":
    main()
