"""From command to first token, and memory against the plan: `python benchmarks/start.py`."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from client import wait_until_ready
from report import write
from serving import family, free_port, peak_mib, server
from shapes import model_folder


def first_token(folder: Path, *plan: str) -> float:
    """Seconds of `tllm generate … --max-tokens 1`, from start to end."""
    words = [sys.executable, "-m", "tllm.cli", "generate", str(folder), "--prompt-ids", "1,2,3", "--max-tokens", "1"]
    start = time.perf_counter()
    subprocess.run([*words, "--json", *plan], check=True, capture_output=True)
    return time.perf_counter() - start


def planned(folder: Path, plan: str) -> list[float]:
    """MiB that `tllm plan` says for each rank, all told."""
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
        body = {"prompt": [list(range(10, 1900))] * 4, "max_tokens": 8, "temperature": 0}
        subprocess.run(
            ["curl", "-sf", f"{url}/v1/completions", "-H", "content-type: application/json", "-d", json.dumps(body)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        workers = sorted(family(process.pid)[-ranks:])
        return [peak_mib(pid) for pid in workers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folders", type=Path, default=Path("/tmp/tllm-bench"))
    options = parser.parse_args()
    folder = model_folder("0.3b", options.folders)
    os.environ["OMP_NUM_THREADS"] = "1"
    raw: dict[str, object] = {}
    lines = ["| from command to first token (0.3B, bfloat16) | s |", "|---|--:|"]
    for plan in ("pp=1", "tp=2", "pp=2,tp=1+2"):
        times = [first_token(folder, "--plan", plan) for _ in range(3)]
        raw[f"first token {plan}"] = times
        lines.append(f"| {plan} | {statistics.median(times):.2f} |")
    lines += ["", "| memory of each rank | plan says, MiB | peak, MiB | peak / plan |", "|---|--:|--:|--:|"]
    for plan, ranks in (("tp=2", 2), ("pp=2,tp=1+2", 3)):
        says, peak = planned(folder, plan), held(folder, plan, ranks)
        raw[f"memory {plan}"] = {"planned_mib": says, "peak_mib": peak}
        for rank, (a, b) in enumerate(zip(says, peak, strict=True)):
            lines.append(f"| {plan}, rank {rank} | {a:.0f} | {b:.0f} | {b / a:.2f} |")
    write("start", "From command to first token, and memory against the plan", "\n".join(lines), raw)


if __name__ == "__main__":
    main()
