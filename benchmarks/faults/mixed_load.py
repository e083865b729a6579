"""Mixed load for a long time: `python -m benchmarks.faults.mixed_load [--seconds 3600] [--warm-seconds 600]`.

Clients at a server's capacity chat, call tools, send long prompts, go away in mid-stream and send what is refused. The
page says what was answered and how fast, and what the server holds afterwards beside what it held after a warm-up:
memory by its kinds, threads and descriptors of each process, tasks, and pages of the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.faults.mixed_clients import CLIENTS, Clients, percentiles
from benchmarks.processes.memory_kinds import HUGE_PAGES, KINDS, grown, memory_kinds
from benchmarks.processes.python_module import ROOT, descendants, free_port
from benchmarks.report.markdown import table
from benchmarks.report.results import Page, write
from benchmarks.serving.openai_client import wait_until_ready
from benchmarks.serving.throughput import server

CACHE = "64MiB"
"""For keys and values of each rank: full after the warm-up, as pages stay for others with the same prefix."""

WARM_SECONDS, REST_SECONDS = 600.0, 3.0
"""What a server holds grows for some minutes, until it has seen all sizes of batches (docs/log/serving.md)."""

RUSHES = 3
"""Rounds of long prompts that come at the same moment, at the end of the warm-up: the largest batches are as rare as
that, and torch's library prepares products, of half a MiB each, for each of its few sizes (docs/log/memory.md)."""

GROWTH = 0.02
"""What a process may hold more after the load than before it, in parts of 1."""

TOLD_KIB = 512
"""Changes of a kind of memory from one rest to the next that the page tells."""


def held(url: str, pid: int) -> dict[str, Any]:
    """What a server that rests holds: of each of its processes, and of it as a whole."""
    metrics = {
        sample.name: sample.value
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text)
        for sample in family.samples
    }
    return {
        "processes": [process_held(one) for one in descendants(pid)],
        "tasks": metrics["tllm_tasks"],
        "running": metrics["vllm:num_requests_running"],
        "waiting": metrics["vllm:num_requests_waiting"],
        "pages": metrics["vllm:kv_cache_usage_perc"],
    }


def process_held(pid: int) -> dict[str, Any]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    kinds = memory_kinds(pid)
    return {
        "name": next((word for word in words if word.startswith("tllm.")), words[0]),
        "rss_kib": sum(kinds[kind] for kind in KINDS),
        "kinds_kib": kinds,
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }


def left_behind(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What a server holds after a load that it did not hold before it, in words."""
    found = [f"tasks: {before['tasks']:g} before, {after['tasks']:g} after"] if after["tasks"] > before["tasks"] else []
    found += [f"{name}: {after[name]:g} at rest" for name in ("running", "waiting", "pages") if after[name]]
    olds, news = before["processes"], after["processes"]
    if len(olds) != len(news):
        return [*found, f"{len(olds)} processes before, {len(news)} after"]
    for place, (old, new) in enumerate(zip(olds, news, strict=True)):
        where = f"process {place} ({new['name']})"
        found += [
            f"{where}: {old[name]} {name} before, {new[name]} after"
            for name in ("threads", "descriptors")
            if new[name] > old[name]
        ]
        if new["rss_kib"] > old["rss_kib"] * (1 + GROWTH):
            what = grown(old["kinds_kib"], new["kinds_kib"], TOLD_KIB)
            found.append(f"{where}: {old['rss_kib']} KiB before, {new['rss_kib']} after ({what})")
    return found


def run(model: str, plan: str, seconds: float, warm_seconds: float = WARM_SECONDS) -> dict[str, Any]:
    """Load a server of this machine for so many seconds after a warm-up; the figures."""
    port = free_port()
    url, name = f"http://127.0.0.1:{port}", Path(model).name
    words = [sys.executable, "-m", "tllm.cli", "serve", model, "--plan", plan, "--threads", "1", "--quiet"]
    with server(
        [*words, "--port", str(port), "--max-num-seqs", str(CLIENTS), "--kv-cache-memory", CACHE], 1
    ) as process:
        wait_until_ready(url, process)
        asyncio.run(Clients(url, name).ask_for(warm_seconds))
        asyncio.run(Clients(url, name).rush(RUSHES))
        time.sleep(REST_SECONDS)
        marks = [held(url, process.pid) | {"done": 0}]
        clients, parts = Clients(url, name), max(1, round(seconds / 300))
        for part in range(parts):
            asyncio.run(clients.ask_for(seconds / parts))
            time.sleep(REST_SECONDS)
            done = sum(one.done for one in clients.seen.values())
            marks.append(held(url, process.pid) | {"done": done})
            print(
                f"{part + 1} of {parts}: {done} requests; {'; '.join(changes(*marks[-2:])) or 'nothing grew'}",
                flush=True,
            )
    return {
        "model": name,
        "plan": plan,
        "seconds": seconds,
        "warm_seconds": warm_seconds,
        "seen": {kind: seen.figures() for kind, seen in clients.seen.items()},
        "faults": dict(clients.faults),
        "held": marks,
        "left": left_behind(marks[0], marks[-1]),
    }


PURPOSE = """Whether a server stays as it is under hours of what people send: {clients} clients without a pause between
requests, for {minutes:.0f} minutes, to `tllm serve {model} --plan {plan}` with a thread for each rank. Of 14 requests 6
are chats of two turns, 2 are held to call a tool, 2 have a prompt of 300 words, 2 are left in mid-stream by their
client and 2 are such as have to be refused."""
READING = """Goodput: {rate:.1f} tokens a second, those of replies that were left not counted; {done} requests, of which
{wrong} were not answered as they should have been. What it holds is read at rest, {rest:g} s after the last request:
at first after a warm-up of {warm:g} s under the same load, and of long prompts that come at the same moment, from
all clients, from one less and so on. {said}"""
LIMITS = """- A tiny model, so that much of the work is the server's and not the model's.
- Other programs may use the machine's cores meanwhile: the times are upper bounds. `python -m
  benchmarks.faults.mixed_load_beside` asks the same of llama.cpp's server.
- Clients and server share this machine's cores."""


def page(found: Mapping[str, Any]) -> Page:
    """The page of raw figures."""
    spread = "median / p95 / p99"
    lines = [["kind", "answered", "tokens", f"first token, s: {spread}", f"whole, s: {spread}"]]
    for kind, seen in sorted(found["seen"].items()):
        times = [percentiles(seen[name]) for name in ("first_s", "whole_s")]
        lines.append([kind, str(seen["done"]), str(seen["tokens"]), *times])
    first, last = found["held"][0], found["held"][-1]
    kept = [["at rest", "after the warm-up", "at the end"]]
    for place, (old, new) in enumerate(zip(first["processes"], last["processes"], strict=False)):
        for name, unit in (("rss_kib", "KiB"), ("threads", "threads"), ("descriptors", "descriptors")):
            kept.append([f"process {place}, {old['name']}: {unit}", str(old[name]), str(new[name])])
    kept += [[name, f"{first[name]:g}", f"{last[name]:g}"] for name in ("tasks", "running", "waiting", "pages")]
    tokens = sum(seen["tokens"] for seen in found["seen"].values())
    said = "Nothing was left behind." if not found["left"] else f"Left behind: {'; '.join(found['left'])}."
    reading = READING.format(
        rate=tokens / found["seconds"],
        done=sum(seen["done"] for seen in found["seen"].values()),
        wrong=sum(found["faults"].values()),
        rest=REST_SECONDS,
        warm=found["warm_seconds"],
        said=said,
    )
    purpose = PURPOSE.format(clients=CLIENTS, minutes=found["seconds"] / 60, model=found["model"], plan=found["plan"])
    grew = table(growth(found["held"]), comment=True)
    body = "\n\n".join((*map(table, (lines, kept, kinds(first, last))), grew))
    return Page("faults", "mixed-load", "Serving: mixed load for a long time", purpose, body, reading, LIMITS)


def growth(marks: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The memory of each process at each rest, in MiB, by the requests since the warm-up, and which kinds changed."""
    names = [f"process {place}" for place, _ in enumerate(marks[0]["processes"])]
    rows = [
        [
            f"{mark['done']}",
            *(f"{one['rss_kib'] / 1024:.1f}" for one in mark["processes"]),
            "; ".join(changes(marks[place - 1], mark)) if place else "",
        ]
        for place, mark in enumerate(marks)
    ]
    return [["requests since the warm-up", *(f"{name}: MiB" for name in names), "what changed"], *rows]


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Of each process the kinds of memory that grew or shrank from one rest to the next, in words."""
    pairs = enumerate(zip(before["processes"], after["processes"], strict=False))
    told = [(place, grown(old["kinds_kib"], new["kinds_kib"], TOLD_KIB)) for place, (old, new) in pairs]
    return [f"process {place}: {what}" for place, what in told if what]


def kinds(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[list[str]]:
    """MiB of each kind of memory in each process, after the warm-up and at the end."""
    names = [f"process {place}" for place, _ in enumerate(first["processes"])]
    pairs = list(zip(first["processes"], last["processes"], strict=False))
    rows = [
        [kind, *(" to ".join(f"{one['kinds_kib'][kind] / 1024:.1f}" for one in pair) for pair in pairs)]
        for kind in (*KINDS, HUGE_PAGES)
    ]
    return [["MiB, after the warm-up and at the end", *names], *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "models" / "tiny"))
    parser.add_argument("--plan", default="pp=2")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--warm-seconds", type=float, default=WARM_SECONDS)
    options = parser.parse_args()
    found = run(options.model, options.plan, options.seconds, options.warm_seconds)
    write(page(found), found)
    for fault, times in found["faults"].items():
        print(f"{times} times: {fault}", file=sys.stderr)
    sys.exit(1 if found["faults"] or found["left"] else 0)


if __name__ == "__main__":
    main()
