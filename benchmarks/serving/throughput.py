"""Tokens per second of serving: `python -m benchmarks.serving.throughput SIZE [--vllm-python PYTHON]`.

Measures tllm as one process, with tensor parallelism over two and as a pipeline of two, beside `transformers` alone and
with its own tensor parallelism, and beside vLLM's CPU build if an environment that has it is given. All have the same
weights. Those that are compared are up together and take turns, so that what else the machine does for a while slows
all of them. Servers are asked over HTTP; `transformers` runs in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.models.random_llama import SHAPES, model_folder, parameters
from benchmarks.processes.alternating_processes import alternate, contender
from benchmarks.processes.python_module import descendants, environment, free_port, module_command, peak_mib
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import Page, write
from benchmarks.serving.openai_client import measure, wait_until_ready
from tllm.kernels.library import compiled

Figures = dict[str, Any]
Take = Callable[[int], Figures]
"""The figures of a contender's turn, by the turn's number."""
Start = Callable[[], AbstractContextManager[Take]]


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
            with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
                os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def asked_server(words: list[str], threads: int) -> Iterator[Take]:
    """A server that is up and answers."""
    port = free_port()
    start = time.perf_counter()
    with server([*words, "--port", str(port)], threads) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process)
        ready = time.perf_counter() - start

        def take(turn: int) -> Figures:
            figures: Figures = asyncio.run(measure(url, repeats=1, first=turn))
            return {**figures, "ready_s": ready, "peak_mib": {pid: peak_mib(pid) for pid in descendants(process.pid)}}

        yield take


def tllm(folder: Path, threads: int, *more: str, dtype: str = "bfloat16") -> AbstractContextManager[Take]:
    words = [sys.executable, "-m", "tllm.cli", "serve", str(folder), "--dtype", dtype, "--threads", str(threads)]
    return asked_server([*words, "--quiet", *more], threads)


@contextlib.contextmanager
def transformers(folder: Path, threads: int, ranks: int = 1, dtype: str = "bfloat16") -> Iterator[Take]:
    run = [sys.executable]
    if ranks > 1:
        run += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    words = [*run, "-m", "benchmarks.serving.transformers_generation", str(folder), "--dtype", dtype]
    words += ["--threads", str(threads), *(["--tp"] if ranks > 1 else [])]
    with tempfile.TemporaryDirectory() as logs, contender([words], Path(logs), threads) as process:
        process.ready()
        yield lambda turn: process.ask(str(turn))[0]


def vllm(python: str, folder: Path, threads: int) -> AbstractContextManager[Take]:
    words = [str(Path(python).with_name("vllm")), "serve", str(folder), "--skip-tokenizer-init", "--dtype", "bfloat16"]
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}")
    return asked_server([*words, "--max-model-len", "2048"], threads)


def read_rate(threads: int) -> float:
    """GB/s at which memory is read: what limits decoding."""
    words = module_command("serving.memory_read_rate", str(threads))
    return float(subprocess.run(words, env=environment(), capture_output=True, text=True, check=True).stdout)


def matches(folder: Path, vllm_python: str | None, has_float32: bool) -> list[dict[str, Start]]:
    """The contenders in sets that take turns: each set fits into memory at once."""
    one_thread: dict[str, Start] = {
        "tllm, 1 thread": partial(tllm, folder, 1),
        "transformers, 1 thread": partial(transformers, folder, 1),
        "tllm, tp=2, 1 thread each": partial(tllm, folder, 1, "--plan", "tp=2"),
        "transformers, tp 2, 1 thread each": partial(transformers, folder, 1, ranks=2),
        "tllm, pp=2, 1 thread each": partial(tllm, folder, 1, "--plan", "pp=2"),
    }
    two_threads: dict[str, Start] = {
        "tllm, 2 threads": partial(tllm, folder, 2),
        "transformers, 2 threads": partial(transformers, folder, 2),
    }
    if vllm_python:
        two_threads["vLLM, 2 threads"] = partial(vllm, vllm_python, folder, 2)
    in_float32: dict[str, Start] = {
        "tllm, 2 threads, float32": partial(tllm, folder, 2, dtype="float32"),
        "transformers, 2 threads, float32": partial(transformers, folder, 2, dtype="float32"),
    }
    return [one_thread, two_threads, *([in_float32] if has_float32 else [])]


def take_turns(starts: dict[str, Start], rounds: int) -> dict[str, list[Figures]]:
    """The figures of each contender by turns, after a round that warms up."""
    raw: dict[str, list[Figures]] = {name: [] for name in starts}
    with ExitStack() as stack:
        takes: dict[str, Take] = {}
        for name, start in starts.items():
            print(f"start {name}", flush=True)
            try:
                takes[name] = stack.enter_context(start())
            except TimeoutError as error:  # one that does not start leaves the others' figures whole
                raw[name].append({"failed": str(error)})
        for name, figures in alternate(takes, rounds).items():
            raw[name] += figures[1:]
    return raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=("0.3b", "1.1b"))
    parser.add_argument("--folders", type=Path, default=Path("/tmp/tllm-bench"), help="where model folders are kept")
    parser.add_argument("--rounds", type=int, choices=range(1, 10), default=4)
    parser.add_argument("--vllm-python", help="python of an environment that has vllm-cpu")
    parser.add_argument("--float32", action="store_true", help="also one process in float32")
    options = parser.parse_args()
    folder = model_folder(options.size, options.folders)
    raw: dict[str, list[Figures]] = {}
    limits: dict[int, list[float]] = {1: [], 2: []}
    for starts in matches(folder, options.vllm_python, options.float32):
        for threads in limits:
            limits[threads].append(read_rate(threads))
        raw |= take_turns(starts, options.rounds)
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
random weights in bfloat16, the same threads and the same requests. It answers what a user gains or loses against the
tools that he has, and what two processes of one machine gain over one. Those that are compared are up together and
take turns. Servers are asked over HTTP; `transformers` generates in a process of its own. Greedy decoding."""
READING = """Decode: one request, prompt of 128, from the first to the last of 64 tokens. Prompt of 512: its tokens over
the time to the first new token. 8 requests: all new tokens over the time of all, sent at once. Medians over rounds; a
ratio is the median of the ratios of each round. Read limit: the rate at which this machine reads bfloat16 weights from
memory, and the tokens per second that this allows at most when each token reads all weights. Trust ratios more than
absolute numbers: the machine is a shared virtual one."""
LIMITS = """- Two processes on one machine share its memory bandwidth, which limits decoding: neither tensor nor
  pipeline parallelism can come near twice one process there. Between machines each has its own memory.
- A pipeline on one machine reads the weights once for each half of the requests, so it gains nothing.
- Only small models with random weights, no long prompts, no more than 8 requests at once."""


def page(size: str, found: dict[str, Any]) -> Page:
    """The page of raw figures: `runs` of each contender, and the read limit for each number of threads."""
    raw, kind = found["runs"], compiled()[0].name
    title = f"Serving a model of {parameters(size)}, bfloat16, kernels for {kind}"
    body = speeds_table(raw, found["read_limit"]) + "\n\n" + table(ratios(raw))
    behind = [line for line in ratios(raw)[1:] if min(map(float, line[1:])) < 1]
    ours = [f"- {name}: {a} (decode), {b} (prompts), {c} (8 requests)." for name, a, b, c in behind]
    reading = f"{conclusions(raw, found['read_limit'])}\n\n{READING}"
    limits = "\n".join(["Ratios of which a part is below 1:", "", *ours, LIMITS] if ours else [LIMITS])
    return Page("serving", f"serving-{size}-{kind}", title, PURPOSE, body, reading, limits)


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
        medians = [median(raw, name, key) for key in KEYS]
        ready = [one["ready_s"] for one in raw[name] if "ready_s" in one]
        cells = ["failed" if value is None else f"{value:.1f}" for value in medians]
        rows.append([name, *cells, f"{statistics.median(ready):.1f}" if ready else ""])
    for threads, limit in limits.items():
        what = f"read limit, threads: {threads} ({limit['gb_s']:.1f} GB/s)"
        rows.append([what, f"{limit['tok_s']:.1f}", "", "", ""])
    return table(rows)


def values(raw: dict[str, list[Figures]], name: str, key: str) -> list[float]:
    """What a contender reached in each round."""
    return [value for one in raw.get(name, []) for value in one.get(key, [])]


def median(raw: dict[str, list[Figures]], name: str, key: str) -> float | None:
    found = values(raw, name, key)
    return statistics.median(found) if found else None


def ratios(raw: dict[str, list[Figures]]) -> list[list[str]]:
    """The median over rounds of one contender over another, for every pair that was measured; titles first."""
    rows = [["ratio", "decode", "prompt of 512", "8 requests"]]
    for ours, theirs in PAIRS:
        both = [list(zip(values(raw, ours, key), values(raw, theirs, key), strict=False)) for key in KEYS]
        if all(both):
            found = [statistics.median(mine / other for mine, other in pairs) for pairs in both]
            rows.append([f"{ours} / {theirs}", *(f"{times:.2f}" for times in found)])
    return rows


if __name__ == "__main__":
    main()
