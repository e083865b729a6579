"""Serving, side by side in one run: `python benchmarks/serving.py SIZE [--vllm-python PYTHON]`.

One process, tensor parallel over two, a pipeline of two; `transformers` alone and with its own tensor parallel; vLLM's
CPU build if an environment that has it is given. Same weights, same threads; servers are asked over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from client import measure, wait_until_ready
from report import write
from shapes import SHAPES, model_folder

HERE = Path(__file__).parent
Figures = dict[str, Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(words: list[str], threads: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server process and all that it starts, ended with the block."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(
        words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def ask_server(words: list[str], threads: int, repeats: int) -> Figures:
    port = free_port()
    start = time.perf_counter()
    with server([*words, "--port", str(port)], threads) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process)
        ready = time.perf_counter() - start
        figures: Figures = asyncio.run(measure(url, repeats))
        figures["ready_s"] = ready
        figures["peak_mib"] = {pid: peak_mib(pid) for pid in family(process.pid)}
    return figures


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


def peak_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def tllm(folder: Path, dtype: str, threads: int, repeats: int, *more: str) -> Figures:
    words = [sys.executable, "-m", "tllm.cli", "serve", str(folder), "--dtype", dtype, "--threads", str(threads)]
    return ask_server([*words, "--quiet", *more], threads, repeats)


def transformers(folder: Path, dtype: str, threads: int, repeats: int, ranks: int = 1) -> Figures:
    run = [sys.executable]
    if ranks > 1:
        run += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    words = [*run, str(HERE / "transformers_peer.py"), str(folder), "--dtype", dtype, "--threads", str(threads)]
    words += ["--repeats", str(repeats), *(["--tp"] if ranks > 1 else [])]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr[-500:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def vllm(python: str, folder: Path, threads: int, repeats: int) -> Figures:
    words = [str(Path(python).with_name("vllm")), "serve", str(folder), "--skip-tokenizer-init", "--dtype", "bfloat16"]
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}")
    return ask_server([*words, "--max-model-len", "2048"], threads, repeats)


def read_limit(threads: int) -> float:
    """GB/s at which torch.mv reads weights much larger than the caches: the limit of decoding."""
    words = [sys.executable, str(HERE / "read_limit.py"), str(threads)]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=("0.3b", "1.1b"))
    parser.add_argument("--folders", type=Path, default=Path("/tmp/tllm-bench"), help="where model folders are kept")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="how often the whole list is gone through")
    parser.add_argument("--vllm-python", help="python of an environment that has vllm-cpu")
    parser.add_argument("--float32", action="store_true", help="also one process in float32")
    options = parser.parse_args()
    folder, n = model_folder(options.size, options.folders), options.repeats
    runs = {
        "tllm, 1 thread": lambda: tllm(folder, "bfloat16", 1, n),
        "transformers, 1 thread": lambda: transformers(folder, "bfloat16", 1, n),
        "tllm, 2 threads": lambda: tllm(folder, "bfloat16", 2, n),
        "transformers, 2 threads": lambda: transformers(folder, "bfloat16", 2, n),
        "tllm, tp=2, 1 thread each": lambda: tllm(folder, "bfloat16", 1, n, "--plan", "tp=2"),
        "transformers, tp 2, 1 thread each": lambda: transformers(folder, "bfloat16", 1, n, ranks=2),
        "tllm, pp=2, 1 thread each": lambda: tllm(folder, "bfloat16", 1, n, "--plan", "pp=2"),
    }
    if options.float32:
        runs["tllm, 2 threads, float32"] = lambda: tllm(folder, "float32", 2, n)
        runs["transformers, 2 threads, float32"] = lambda: transformers(folder, "float32", 2, n)
    if options.vllm_python:
        runs["vLLM, 2 threads"] = lambda: vllm(options.vllm_python, folder, 2, n)
    raw: dict[str, list[Figures]] = {name: [] for name in runs}
    limits: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(options.rounds):
        for threads in limits:
            limits[threads].append(read_limit(threads))
        for name, run in runs.items():
            print(name, flush=True)
            try:
                raw[name].append(run())
            except TimeoutError as error:  # one that does not start leaves the others' figures whole
                raw[name].append({"failed": str(error)})
    embedding = 32000 * SHAPES[options.size]["hidden_size"] * 2  # of which a token reads one row
    weights = (folder / "model.safetensors").stat().st_size - embedding
    write(f"serving-{options.size}", f"Serving {options.size}, bfloat16", table(raw, limits, weights), raw, ratios(raw))


def table(raw: dict[str, list[Figures]], limits: dict[int, list[float]], weights: int) -> str:
    lines = [
        "| | decode tok/s | prefill of 512, tok/s | 8 requests of 128+64, tok/s | ready after s |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, rounds in raw.items():
        cells = []
        for key in ("decode_tok_s", "prefill_tok_s", "eight_tok_s"):
            values = [value for one in rounds for value in one.get(key, [])]
            cells.append(f"{statistics.median(values):.1f}" if values else "failed")
        ready = [one["ready_s"] for one in rounds if "ready_s" in one]
        cells.append(f"{statistics.median(ready):.1f}" if ready else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for threads, speeds in limits.items():
        best = max(speeds)
        lines.append(f"| read limit, {threads} threads: {best:.1f} GB/s | {best * 1e9 / weights:.1f} | | | |")
    return "\n".join(lines) + "\n\nMedians over all rounds and repeats; the read limit is the best of its rounds."


PAIRS = (
    ("tllm, 1 thread", "transformers, 1 thread"),
    ("tllm, 2 threads", "transformers, 2 threads"),
    ("tllm, tp=2, 1 thread each", "tllm, 1 thread"),
    ("tllm, tp=2, 1 thread each", "transformers, tp 2, 1 thread each"),
    ("tllm, pp=2, 1 thread each", "tllm, 1 thread"),
    ("tllm, 2 threads, float32", "transformers, 2 threads, float32"),
    ("tllm, 2 threads", "vLLM, 2 threads"),
)


def ratios(raw: dict[str, list[Figures]]) -> str:
    """What is claimed and what is not: medians of one over the other."""

    def median(name: str, key: str) -> float | None:
        values = [value for one in raw.get(name, []) for value in one.get(key, [])]
        return statistics.median(values) if values else None

    lines = ["| ratio | decode | prefill | 8 requests |", "|---|--:|--:|--:|"]
    for ours, theirs in PAIRS:
        both = [(median(ours, k), median(theirs, k)) for k in ("decode_tok_s", "prefill_tok_s", "eight_tok_s")]
        if all(a and b for a, b in both):
            lines.append(f"| {ours} / {theirs} | " + " | ".join(f"{a / b:.2f}" for a, b in both if a and b) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
