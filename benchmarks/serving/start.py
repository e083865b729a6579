"""Start-up time and memory of serving: `python -m benchmarks.serving.start`.

The seconds from a command to its first token under three plans, and the peak memory of each rank beside what `tllm
plan` says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.models.random_llama import model_folder
from benchmarks.processes.python_module import descendants, free_port, peak_mib
from benchmarks.report.markdown import table
from benchmarks.report.results import Page, write
from benchmarks.serving.openai_client import wait_until_ready
from benchmarks.serving.throughput import server


def first_token(folder: Path, *plan: str) -> float:
    """Seconds of `tllm generate … --max-tokens 1`, from start to end."""
    words = [sys.executable, "-m", "tllm.cli", "generate", str(folder), "--prompt-ids", "1,2,3", "--max-tokens", "1"]
    start = time.perf_counter()
    subprocess.run([*words, "--json", *plan], check=True, capture_output=True)
    return time.perf_counter() - start


def planned(folder: Path, plan: str) -> list[float]:
    """MiB that `tllm plan` predicts for each rank."""
    words = [sys.executable, "-m", "tllm.cli", "plan", str(folder), "--plan", plan, "--json"]
    found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return [rank["sum_bytes"] / 2**20 for rank in found["ranks"]]


def held(folder: Path, plan: str, ranks: int) -> list[float]:
    """Peak MiB of each rank's process after prompts that fill whole batches."""
    port = free_port()
    words = [sys.executable, "-m", "tllm.cli", "serve", str(folder), "--plan", plan, "--threads", "1", "--quiet"]
    with server([*words, "--port", str(port)], 1) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process)
        body = {
            "prompt": [list(range(first, first + 1890)) for first in (10, 11, 12, 13)],
            "max_tokens": 8,
            "temperature": 0,
        }
        subprocess.run(
            ["curl", "-sf", f"{url}/v1/completions", "-H", "content-type: application/json", "-d", json.dumps(body)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        workers = sorted(descendants(process.pid)[-ranks:])
        return [peak_mib(pid) for pid in workers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folders", type=Path, default=Path("/tmp/tllm-bench"))
    options = parser.parse_args()
    folder = model_folder("0.3b", options.folders)
    os.environ["OMP_NUM_THREADS"] = "1"
    raw: dict[str, Any] = {}
    for plan in ("pp=1", "tp=2", "pp=2,tp=1+2"):
        raw[f"first token {plan}"] = [first_token(folder, "--plan", plan) for _ in range(3)]
    for plan, ranks in (("tp=2", 2), ("pp=2,tp=1+2", 3)):
        raw[f"memory {plan}"] = {"planned_mib": planned(folder, plan), "peak_mib": held(folder, plan, ranks)}
    write(page(raw), raw)


PURPOSE = """How long a user waits from the command `tllm generate` to the first token, with one process and with
several on this machine, and whether the memory of each rank is what `tllm plan` said. Model: 0.3 billion parameters in
bfloat16. One thread for each rank."""
READING = """First token: the whole time of the command, Python's start included; median of three. Memory: the peak of
each rank's process after four prompts of 1,890 tokens, beside the total that `tllm plan` prints for it. Peaks were
{least:.2f} to {most:.2f} times what was planned."""
LIMITS = """- Each further process costs the import of torch once more, and here all share two cores.
- The model's file is in the page cache after the first command: from a cold disk, reading it comes on top.
- One model size, one machine; nothing was fetched over a network."""


def page(raw: dict[str, Any]) -> Page:
    """The page of raw figures: seconds under `first token PLAN`, MiB of each rank under `memory PLAN`."""
    first = [["command to first token, plan", "s"]]
    memory = [["memory of a rank", "planned, MiB", "peak, MiB", "peak / planned"]]
    shares = list[float]()
    for name, one in raw.items():
        if name.startswith("first token "):
            first.append([name.removeprefix("first token "), f"{statistics.median(one):.2f}"])
            continue
        for rank, (says, peak) in enumerate(zip(one["planned_mib"], one["peak_mib"], strict=True)):
            shares.append(peak / says)
            name = name.removeprefix("memory ")
            memory.append([f"{name}, rank {rank}", f"{says:.0f}", f"{peak:.0f}", f"{peak / says:.2f}"])
    reading = READING.format(least=min(shares), most=max(shares))
    body = f"{table(first)}\n\n{table(memory)}"
    return Page("serving", "start", "Serving: start-up time and memory", PURPOSE, body, reading, LIMITS)


if __name__ == "__main__":
    main()
