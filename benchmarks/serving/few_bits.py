"""Decoding and prompts in few bits beside llama.cpp: `python -m benchmarks.serving.few_bits --llama-python PYTHON`.

Each program has one process, the same random weights in the same number of bits, and the same threads. They are run by
turns, so that what else the machine does for a while slows both. There is a page for each kind of processor, by the
instruction set of the kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.models.gguf_copy import gguf_copy, weight_bytes
from benchmarks.models.random_llama import model_folder, parameters
from benchmarks.processes.python_module import environment, module_command
from benchmarks.report.markdown import table
from benchmarks.report.results import Page, write
from benchmarks.serving.throughput import read_rate
from tllm.kernels.library import compiled

FORMS = ("bfloat16", "int8", "int4")
THREADS = (1, 2)
PROMPT, REPLY, REPEATS = 512, 48, 2
PEER = Path(__file__).with_name("llama_cpp_process.py")

Figures = dict[str, Any]


def run(words: list[str], threads: int) -> Figures:
    """What a process prints as its last line."""
    env = environment(OMP_NUM_THREADS=str(threads))
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("0.3b", "1.1b"), default="1.1b")
    parser.add_argument("--folders", type=Path, default=Path("/tmp/tllm-bench"), help="where model folders are kept")
    parser.add_argument("--llama-python", help="python of an environment that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    options = parser.parse_args()
    folder = model_folder(options.size, options.folders)
    files = {form: gguf_copy(folder, form) for form in options.forms}
    asked = [str(number) for number in (PROMPT, REPLY, REPEATS)]
    raw: dict[str, list[Figures]] = {}
    limits: dict[str, list[float]] = {str(threads): [] for threads in THREADS}
    for _ in range(options.rounds):
        for threads in THREADS:
            limits[str(threads)].append(read_rate(threads))
            for form in options.forms:
                own = module_command("serving.one_process", str(folder), form, str(threads), *asked)
                raw.setdefault(f"tllm {form} {threads}", []).append(run(own, threads))
                if options.llama_python:
                    peer = [options.llama_python, str(PEER), str(files[form]), str(threads), *asked]
                    raw.setdefault(f"llama.cpp {form} {threads}", []).append(run(peer, threads))
                print(form, threads, {name: decode(found) for name, found in raw.items()}, flush=True)
    read = {form: weight_bytes(file) for form, file in files.items()}
    found = {"runs": raw, "read_gb_s": limits, "weight_bytes": read, "size": options.size}
    found["kernels"] = compiled()[0].name
    write(page(found), found)


def decode(runs: list[Figures]) -> float:
    """Tokens a second: of the rounds, the middle one, or the mean of the middle two."""
    rate: float = statistics.median(1 / one["token_s"] for one in runs)
    return round(rate, 1)


def prefill(runs: list[Figures]) -> float:
    rate: float = statistics.median(PROMPT / min(one["prompt_s"]) for one in runs)
    return round(rate, 1)


TITLES = [
    "weights",
    "threads",
    "tok/s",
    "llama.cpp",
    "ratio",
    "of the read",
    "prompt, tok/s",
    "llama.cpp",
    "ratio",
]
PURPOSE = """One process that decodes one sequence after a prompt of 512 tokens, a Llama of {parameters} with random
weights, in bfloat16 and rounded to 8 and 4 bits (`--quantize`), beside llama.cpp with the same weights as BF16, Q8_0
and Q4_0 (the table of the logits in Q8_0, as tllm keeps it)."""
READING = """`of the read`: the bytes of the weights that a token reads, a second, as a part of the speed at which
`torch.sum` reads memory ({read} GB/s with one thread and with two, measured between the runs). Best of {repeats} a
round, the median over {rounds} rounds by turns. Peer: llama-cpp-python {version}, built on this machine."""
LIMITS = """- Random weights: speed does not depend on what they are.
- On a machine whose cores are shared, memory's speed changes from minute to minute; ratios of one round vary by a few
  percent."""


def page(found: Mapping[str, Any]) -> Page:
    """The page of raw figures."""
    runs, limits, read = found["runs"], found["read_gb_s"], found["weight_bytes"]
    lines = [TITLES]
    for threads in THREADS:
        for form in read:
            own, peer = runs[f"tllm {form} {threads}"], runs.get(f"llama.cpp {form} {threads}")
            share = decode(own) * read[form] / 1e9 / max(limits[str(threads)])
            beside = [("", "")] * 2
            if peer:
                beside = [(f"{of(peer)}", f"{of(own) / of(peer):.2f}") for of in (decode, prefill)]
            (tokens, faster), (prompts, sooner) = beside
            line = [form, str(threads), f"{decode(own)}", tokens, faster, f"{100 * share:.0f} %"]
            lines.append([*line, f"{prefill(own)}", prompts, sooner])
    peers = [one["version"] for name, some in runs.items() if "llama" in name for one in some]
    numbers = dict(
        read=" and ".join(f"{max(speeds):.1f}" for speeds in limits.values()),
        repeats=REPEATS,
        rounds=len(limits["1"]),
        version=peers[0] if peers else "was not there",
    )
    purpose = PURPOSE.format(parameters=parameters(found["size"]))
    kind, reading = found["kernels"], READING.format(**numbers)
    title = f"Serving: few bits, beside llama.cpp, kernels for {kind}"
    return Page("serving", f"few-bits-{kind}", title, purpose, table(lines, left=1), reading, LIMITS)


if __name__ == "__main__":
    main()
