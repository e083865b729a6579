"""One model over two machines, beside other programs: `python -m benchmarks.serving.two_machines` (as root).

Two hosts of this computer have a processor each and are joined by a switch, as it is or with a rate and a delay. Each
program has the same random weights in as many bits, one thread on each host, and runs after the others. tllm is asked
over HTTP and its link has TLS; llama.cpp is measured by its own `llama-batched-bench`, distributed-llama by what its
command prints, both without HTTP and without encryption.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.models.gguf_copy import gguf_copy
from benchmarks.models.random_llama import SHAPES, model_folder, parameters
from benchmarks.processes.python_module import environment
from benchmarks.report.markdown import table
from benchmarks.report.results import BENCHMARKS, Page, raw_of, write
from benchmarks.serving.openai_client import measure, wait_until_ready
from benchmarks.serving.two_machine_peers import distributed_llama, llama_cpp, on
from tests.support.cluster.hosts import Hosts, why_not
from tests.support.comm.namespaces import inside

LINKS = {"switch": ("", 0.0), "1 Gbit/s, 0.5 ms": ("1gbit", 0.25)}
"""Rate and delay one way, in ms. The last name says how long a message and its answer take."""

FORMS = {"bfloat16": [], "int8": ["--quantize", "int8"], "int4": ["--quantize", "int4"]}
EIGHT = (32, 32)
"""Tokens of the prompt and of the reply of each of eight requests."""

PORT, SECRET = 29_400, "5b" * 32
SECONDS = 240.0

Figures = dict[str, Any]


@contextmanager
def joined_hosts(link: str) -> Iterator[Hosts]:
    rate, delay_ms = LINKS[link]
    with Hosts(2, rate=rate, delay_ms=delay_ms) as hosts:
        hosts.put_relay_first()
        yield hosts


def tllm(hosts: Hosts, folder: Path, form: str, plan: str, repeats: int) -> Figures:
    """Over both hosts, or with `pp=1` on the first alone."""
    words = ["serve", str(folder), "--dtype", "bfloat16", *FORMS[form], "--threads", "1", "--quiet"]
    words += ["--port", str(PORT), "--plan", plan, "--max-model-len", "1024"]
    is_alone = plan == "pp=1"
    if not is_alone:
        words += ["--nodes", "2", "--cluster-host", hosts.addresses[0], "--cluster-port", str(PORT + 1)]
    env = environment(OMP_NUM_THREADS="1", TLLM_SECRET=SECRET)
    with tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "server"
        server = hosts.start(0, *on(0, sys.executable, "-m", "tllm.cli", *words), env=env, log=log)
        others = []
        if not is_alone:
            _wait_for_words(log, "tllm join")
            join = ["join", f"{hosts.addresses[0]}:{PORT + 1}", "--threads", "1", "--listen", hosts.addresses[1]]
            command = on(1, sys.executable, "-m", "tllm.cli", *join)
            others.append(hosts.start(1, *command, env=env, log=Path(logs) / "node"))
        url = f"http://127.0.0.1:{PORT}"
        try:
            with inside(hosts.names[0]):
                wait_until_ready(url, server, SECONDS)
                return dict(asyncio.run(measure(url, repeats, *EIGHT)))
        except TimeoutError:
            sys.exit(log.read_text()[-2000:])
        finally:
            for process in (server, *others):
                process.send_signal(2)
            for process in (server, *others):
                process.wait(30)


def _wait_for_words(log: Path, words: str) -> None:
    until = time.monotonic() + SECONDS
    while words not in log.read_text():
        if time.monotonic() > until:
            raise TimeoutError(log.read_text())
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("0.3b", "1.1b"), default="1.1b")
    parser.add_argument("--folders", type=Path, default=Path("/tmp/tllm-bench"), help="where model folders are kept")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=tuple(LINKS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=tuple(FORMS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--llama-cpp", type=Path, help="folder with llama-batched-bench and ggml-rpc-server")
    parser.add_argument("--distributed-llama", type=Path, help="folder with dllama, model.m (q40) and tokenizer.t")
    parser.add_argument("--more", action="store_true", help="add to the runs of the page that is there")
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    folder = model_folder(options.size, options.folders)
    page_path = BENCHMARKS / "serving" / "results" / f"two-machines-{options.size}.md"
    found = raw_of(page_path) if options.more else {"size": options.size, "runs": {}}
    for _ in range(options.rounds):
        for link in options.links:
            for form in options.forms:
                for name, run in contenders(options, folder, form).items():
                    with joined_hosts(link) as hosts:
                        begun = time.monotonic()
                        figures = run(hosts)
                    found["runs"].setdefault(link, {}).setdefault(form, {}).setdefault(name, []).append(figures)
                    print(f"{link}, {form}, {name} ({time.monotonic() - begun:.0f} s): {figures}", flush=True)
    write(page(found), found)


def contenders(options: argparse.Namespace, folder: Path, form: str) -> dict[str, Callable[[Hosts], Figures]]:
    """Each program by its name, for these bits."""
    plans = {"tllm, one machine": "pp=1", "tllm, tp=2": "tp=2", "tllm, pp=2": "pp=2"}
    runs: dict[str, Callable[[Hosts], Figures]] = {
        name: partial(tllm, folder=folder, form=form, plan=plan, repeats=options.repeats)
        for name, plan in plans.items()
    }
    if programs := options.llama_cpp:
        file, layers = gguf_copy(folder, form), SHAPES[options.size]["num_hidden_layers"]
        runs["llama.cpp, one machine"] = partial(llama_cpp, programs=programs, file=file, layers=0, eight=EIGHT)
        runs["llama.cpp, RPC"] = partial(llama_cpp, programs=programs, file=file, layers=layers // 2, eight=EIGHT)
    if options.distributed_llama and form == "int4":
        runs["distributed-llama"] = partial(distributed_llama, place=options.distributed_llama)
    return runs


KEYS = ("decode_tok_s", "prefill_tok_s", "eight_tok_s")
TITLES = ["link", "weights", "", "1 request, tok/s", "beside one machine", "prompt of 512, tok/s", "8 requests, tok/s"]
PURPOSE = """What a second machine gains, and what two machines give under other programs: a Llama of {parameters} with
random weights, in bfloat16 or rounded to 8 or 4 bits (Q8_0 and Q4_0 for llama.cpp, q40 for distributed-llama)."""
READING = """1 request: a prompt of 128, then the rate of 64 tokens. 8 requests: of {eight} tokens at once, all new
tokens over the time of all. Rounds: {rounds}, of which the median. `beside one machine`: over the same program and
weights on the first host alone; for distributed-llama over tllm's. tllm is asked over HTTP and its links are encrypted;
llama.cpp and distributed-llama are measured inside their own programs and send in the clear. llama.cpp RPC has half of
the layers on each host. {said}"""
LIMITS = """- The aims are 1.5 times llama.cpp's RPC over 1 Gbit/s, also for one request, and for tp=2 1.7 times one
  machine.
- Both hosts are processors of one computer, which share its memory (and, if they are two threads of one
  core, its arithmetic): two machines of their own gain more, with every program.
- distributed-llama takes one request at a time.
- A message's delay is made by a relay in user space, which takes some of the processors' time."""


def rate(runs: list[Figures], key: str) -> float | None:
    values = [value for one in runs for value in one.get(key, [])]
    return statistics.median(values) if values else None


def page(found: Mapping[str, Any]) -> Page:
    """The page of raw figures."""
    lines, rounds = [TITLES], 0
    for link, forms in found["runs"].items():
        for form, runs in forms.items():
            for name, some in runs.items():
                rounds = max(rounds, len(some))
                alone = runs.get(f"{name.split(',')[0]}, one machine", runs["tllm, one machine"])
                one, whole = rate(some, KEYS[0]), rate(alone, KEYS[0])
                cells = ["" if (value := rate(some, key)) is None else f"{value:.1f}" for key in KEYS]
                gain = f"{one / whole:.2f}" if one and whole and name.split(", ")[-1] != "one machine" else ""
                lines.append([link, form, name, cells[0], gain, *cells[1:]])
    reading = READING.format(eight=" + ".join(map(str, EIGHT)), rounds=rounds, said=said(found["runs"]))
    purpose = PURPOSE.format(parameters=parameters(found["size"]))
    title = f"Serving over two machines, a Llama of {parameters(found['size'])}"
    return Page("serving", f"two-machines-{found['size']}", title, purpose, table(lines, left=3), reading, LIMITS)


def said(runs: Mapping[str, Mapping[str, Mapping[str, list[Figures]]]]) -> str:
    """How many times as fast our better plan is as each other program over the same link."""
    found = []
    for link, forms in runs.items():
        for form, ones in forms.items():
            for name in ("llama.cpp, RPC", "distributed-llama"):
                times = [
                    f"{what} {best(ones, key) / theirs:.2f} times"
                    for what, key in zip(("one request", "a prompt", "8 requests"), KEYS, strict=True)
                    if name in ones and (theirs := rate(ones[name], key))
                ]
                if times:
                    found.append(f"{form} over {link}, tllm's better plan beside {name}: {', '.join(times)}.")
    return " ".join(found)


def best(ones: Mapping[str, list[Figures]], key: str) -> float:
    """Of our plans over both machines."""
    return max(rate(ones[name], key) or 0.0 for name in ("tllm, tp=2", "tllm, pp=2"))


if __name__ == "__main__":
    main()
