"""The mixed load beside llama.cpp's server: `python -m benchmarks.faults.mixed_load_beside --llama-cpp FOLDER`.

tllm and llama.cpp's server read the same GGUF file, have as many threads and as many places for requests, and each is
asked for some minutes by the same clients, one server after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from benchmarks.faults.mixed_clients import CLIENTS, FIRST_SECONDS, NEXT_SECONDS, Clients, percentiles
from benchmarks.models.random_llama import model_folder, parameters
from benchmarks.processes.python_module import ROOT, descendants, free_port
from benchmarks.report.markdown import table
from benchmarks.report.results import Page, write
from benchmarks.serving.openai_client import wait_until_ready
from benchmarks.serving.throughput import server
from tests.support.models.gguf_models import SavedModel, with_tokenizer, write_gguf
from tllm.kernels.library import compiled

SIZE, VOCABULARY, FORM = "0.3b", 2048, "Q8_0"
THREADS = 2
ROOM = 1024
"""Tokens that a sequence may have."""

CACHE = "384MiB"
"""For keys and values: as much as llama.cpp takes for so many sequences of this room."""

WARM_SECONDS = 10.0


def model_file(root: Path) -> Path:
    """Random weights in 8 bits, with the tokenizer and the chat template of `models/tiny`; written on first use."""
    path = root / f"llama-{SIZE}-v{VOCABULARY}-{FORM}.gguf"
    if path.exists():
        return path
    folder = model_folder(SIZE, root, vocabulary=VOCABULARY)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models" / "tiny" / name, folder)
    return write_gguf(SavedModel(folder), path, lambda name: FORM, with_tokenizer(folder))


def commands(file: Path, llama_cpp: Path) -> dict[str, list[str]]:
    """The command line of each server but for its port."""
    own = [sys.executable, "-m", "tllm.cli", "serve", str(file), "--threads", str(THREADS), "--quiet"]
    own += ["--max-model-len", str(ROOM), "--max-num-seqs", str(CLIENTS), "--kv-cache-memory", CACHE]
    peer = [str(llama_cpp / "llama-server"), "-m", str(file), "-t", str(THREADS), "-tb", str(THREADS), "--no-webui"]
    return {"tllm": own, "llama.cpp": [*peer, "--parallel", str(CLIENTS), "-c", str(CLIENTS * ROOM)]}


def run(words: list[str], seconds: float) -> dict[str, Any]:
    """What a server answers in so many seconds, after some that warm it up, and what it then holds."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with server([*words, "--port", str(port)], THREADS) as process:
        wait_until_ready(url, process)
        name = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
        asyncio.run(Clients(url, name, keeps_connections=False).ask_for(WARM_SECONDS))
        clients, begun = Clients(url, name, keeps_connections=False), time.perf_counter()
        asyncio.run(clients.ask_for(seconds))
        return {
            "seconds": time.perf_counter() - begun,
            "seen": {kind: seen.figures() for kind, seen in clients.seen.items()},
            "faults": dict(clients.faults),
            "mib": sum(held_mib(one) for one in descendants(process.pid)),
        }


def held_mib(pid: int) -> float:
    """What a process holds, with its part of what it shares with others, in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


TIMES = ("first token, ms: median / p95 / p99", "next token, ms: median / p95 / p99")
PURPOSE = """What two servers make of the same mixed load at their capacity: a Llama of {parameters} with random weights
in 8 bits ({form}) and {vocabulary} tokens, the same GGUF file for both, {threads} threads, {clients} places and as many
clients without a pause between requests, for {minutes:.1f} minutes each, one after the other. Of 14 requests 6 are
chats of two turns, 2 are held to call a tool, 2 have a prompt of 300 words, 2 are left in mid-stream by their client
and 2 are such as the OpenAI interface refuses."""
READING = """In time is a reply whose first token came within {first:g} s and whose end came as if each further token
took {next:g} s, about as fast as people read. Next token: the mean of each streamed reply. {said}"""
LIMITS = """- One run of each, clients and server on the same two cores.
- Replies of random weights: their lengths are given, and what they say means nothing.
- llama.cpp's server keeps prompts in up to 8 GiB of memory beside its cache, as it does by default."""


def page(found: Mapping[str, Any]) -> Page:
    """The page of raw figures."""
    servers = {name: found[name] for name in ("tllm", "llama.cpp")}
    whole = [["server", "replies in time a second", "tokens a second", "memory, MiB"]]
    lines, limits = [["kind", "server", "answered", "in time", "wrong", *TIMES]], [LIMITS]
    for name, one in servers.items():
        replies, tokens = goodput(one)
        whole.append([name, f"{replies:.2f}", f"{tokens:.1f}", f"{one['mib']:.0f}"])
        if one["faults"]:
            told = "; ".join(f"{count} times {what}" for what, count in sorted(one["faults"].items()))
            limits.append(f"- Not as it should be, {name}: {told}.")
    for kind in sorted({kind for one in servers.values() for kind in one["seen"]}):
        for name, one in servers.items():
            seen = one["seen"][kind]
            times = [percentiles(seen[key], unit=0.001) for key in ("first_s", "next_s")]
            wrong = sum(count for what, count in one["faults"].items() if what.startswith(f"{kind}: "))
            lines.append([kind, name, str(seen["done"]), str(seen["in_time"]), str(wrong), *times])
    own, other = (goodput(one) for one in servers.values())
    replies, tokens = (mine / theirs if theirs else math.inf for mine, theirs in zip(own, other, strict=True))
    said = f"tllm gave {replies:.2f} times the replies in time, and {tokens:.2f} times the tokens."
    purpose = PURPOSE.format(
        parameters=parameters(SIZE),
        form=FORM,
        vocabulary=VOCABULARY,
        threads=THREADS,
        clients=CLIENTS,
        minutes=max(one["seconds"] for one in servers.values()) / 60,
    )
    title = f"Serving: mixed load beside llama.cpp's server, kernels for {found['kernels']}"
    reading = READING.format(first=FIRST_SECONDS, next=NEXT_SECONDS, said=said)
    body = f"{table(whole)}\n\n{table(lines, left=2)}"
    return Page("faults", f"mixed-load-beside-{found['kernels']}", title, purpose, body, reading, "\n".join(limits))


def goodput(one: Mapping[str, Any]) -> tuple[float, float]:
    """Replies in time a second, those to what had to be refused not counted, and tokens a second."""
    replies = sum(seen["in_time"] for kind, seen in one["seen"].items() if kind != "refused")
    tokens = sum(seen["tokens"] for seen in one["seen"].values())
    return replies / one["seconds"], tokens / one["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folders", type=Path, default=Path("/tmp/tllm-bench"), help="where model files are kept")
    parser.add_argument("--llama-cpp", type=Path, required=True, help="folder with llama-server")
    parser.add_argument("--seconds", type=float, default=180.0)
    options = parser.parse_args()
    os.environ["LD_LIBRARY_PATH"] = str(options.llama_cpp)
    found: dict[str, Any] = {"kernels": compiled()[0].name}
    file = model_file(options.folders)
    for name, words in commands(file, options.llama_cpp).items():
        found[name] = run(words, options.seconds)
        print(f"{name}: {sum(seen['done'] for seen in found[name]['seen'].values())} requests answered", flush=True)
        for fault, times in found[name]["faults"].items():
            print(f"{name}: {times} times {fault}", flush=True)
    write(page(found), found)


if __name__ == "__main__":
    main()
