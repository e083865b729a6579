"""Other programs over two hosts: llama.cpp with its RPC, and distributed-llama. Each returns rates of tokens."""

from __future__ import annotations

import json
import os
import re
import string
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tests.support.cluster.hosts import Hosts

PORT = 29_500
SECONDS = 300.0

Figures = dict[str, Any]


def on(host: int, *words: str) -> list[str]:
    """Words that run a command on the processor of a host."""
    return ["taskset", "--cpu-list", str(host), *words]


@contextmanager
def _worker(hosts: Hosts, words: Sequence[str], env: dict[str, str]) -> Iterator[None]:
    """The peer's worker on the second host, once it listens."""
    with tempfile.TemporaryDirectory() as logs:
        process = hosts.start(1, *on(1, *words), env=env, log=Path(logs) / "worker")
        try:
            _wait_for_port(hosts)
            yield
        finally:
            process.kill()
            process.wait()


def _wait_for_port(hosts: Hosts) -> None:
    """Until the second host listens: asked of the kernel, as a connection would be taken for a client."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        listening = hosts.command(1, "cat", "/proc/net/tcp", "/proc/net/tcp6")
        if f":{PORT:04X} " in subprocess.run(listening, capture_output=True, text=True, check=True).stdout:
            return
        time.sleep(0.1)
    raise TimeoutError("the peer's worker does not listen")


def _said(hosts: Hosts, words: Sequence[str], env: dict[str, str]) -> str:
    """What a program of the first host prints."""
    command = hosts.command(0, *on(0, *words))
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def llama_cpp(hosts: Hosts, programs: Path, file: Path, layers: int, eight: tuple[int, int]) -> Figures:
    """`layers` of the model are on the second host, 0: none. `eight`: tokens of each of 8 requests."""
    env = {"LD_LIBRARY_PATH": str(programs)}
    bench = [str(programs / "llama-batched-bench"), "-m", str(file), "-t", "1", "-tb", "1", "-c", "2048"]
    bench += ["-b", "512", "-ub", "512", "--output-format", "jsonl"]

    def measured(prompt: int, reply: int, count: int) -> Figures:
        said = _said(hosts, [*bench, "-npp", str(prompt), "-ntg", str(reply), "-npl", str(count)], env)
        return next(json.loads(line) for line in said.splitlines() if line.startswith("{"))

    with ExitStack() as stack:
        if layers:
            server = [str(programs / "ggml-rpc-server"), "-H", hosts.addresses[1], "-p", str(PORT), "-t", "1"]
            stack.enter_context(_worker(hosts, server, env))
            bench += ["--rpc", f"{hosts.addresses[1]}:{PORT}", "-ngl", str(layers)]
        one, prompt, several = measured(128, 64, 1), measured(512, 1, 1), measured(*eight, 8)
    return {
        "decode_tok_s": [one["speed_tg"]],
        "prefill_tok_s": [prompt["speed_pp"]],
        "eight_tok_s": [8 * eight[1] / several["t"]],
    }


def distributed_llama(hosts: Hosts, place: Path) -> Figures:
    """Both hosts, with activations sent in 8 bits, as its guide has it."""
    program = str(place / "dllama")
    words = [program, "inference", "--model", str(place / "model.m"), "--tokenizer", str(place / "tokenizer.t")]
    words += ["--buffer-float-type", "q80", "--nthreads", "1", "--max-seq-len", "1024"]
    words += ["--workers", f"{hosts.addresses[1]}:{PORT}"]

    def rates(prompt: int, steps: int) -> list[float]:
        """Tokens a second of the prompt and of those after it."""
        text = "".join(islice(cycle(string.ascii_lowercase), prompt))
        with _worker(hosts, [program, "worker", "--port", str(PORT), "--nthreads", "1"], {}):
            said = _said(hosts, [*words, "--prompt", text, "--steps", str(steps)], {})
        return [float(found) for found in re.findall(r"tokens/s: ([\d.]+)", said)]

    return {"decode_tok_s": rates(128, 128 + 64)[1:], "prefill_tok_s": rates(512, 512 + 8)[:1]}
