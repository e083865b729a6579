"""Decoding and prompts in few bits beside llama.cpp: `python -m benchmarks.serving.few_bits --llama-python PYTHON`.

Each program has one process, the same random weights in the same number of bits, and the same threads. Both are up
together and answer by turns, so that what else the machine does for a while slows both. There is a page for each kind
of processor, by the instruction set of the kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.models.gguf_copy import gguf_copy, weight_bytes
from benchmarks.models.random_llama import model_folder, parameters
from benchmarks.processes.alternating_processes import contender
from benchmarks.processes.python_module import module_command
from benchmarks.report.markdown import table
from benchmarks.report.results import Page, write
from benchmarks.serving.throughput import read_rate
from tllm.kernels.library import compiled

FORMS = ("bfloat16", "int8", "int4")
THREADS = (1, 2)
PROMPT, REPLY = 512, 48
PEER = Path(__file__).with_name("llama_cpp_process.py")

Figures = dict[str, Any]
Runs = dict[str, list[Figures]]
"""Of each program, by "tllm" or "llama.cpp", the weights' form and the threads: a figure for each round."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("0.3b", "1.1b"), default="1.1b")
    parser.add_argument("--folders", type=Path, default=Path("/tmp/tllm-bench"), help="where model folders are kept")
    parser.add_argument("--llama-python", help="python of an environment that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    options = parser.parse_args()
    folder = model_folder(options.size, options.folders)
    files = {form: gguf_copy(folder, form) for form in options.forms}
    raw: Runs = {}
    limits: dict[str, list[float]] = {str(threads): [] for threads in THREADS}
    for threads in THREADS:
        for form in options.forms:
            limits[str(threads)].append(read_rate(threads))
            numbers = [str(number) for number in (threads, PROMPT, REPLY)]
            programs = {"tllm": module_command("serving.one_process", str(folder), form, *numbers)}
            if options.llama_python:
                programs["llama.cpp"] = [options.llama_python, str(PEER), str(files[form]), *numbers]
            for name, figures in by_turns(programs, threads, options.rounds).items():
                raw[f"{name} {form} {threads}"] = figures
                rates = [(round(prefill(one), 1), round(decode(one), 1)) for one in figures]
                print(name, form, threads, rates, flush=True)
    read = {form: weight_bytes(file) for form, file in files.items()}
    found = {"runs": raw, "read_gb_s": limits, "weight_bytes": read, "size": options.size}
    found["kernels"] = compiled()[0].name
    write(page(found), found)


def by_turns(programs: Mapping[str, Sequence[str]], threads: int, rounds: int) -> Runs:
    """What each program reports of a prompt and a reply in each round."""
    found: Runs = {name: [] for name in programs}
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        up = {name: stack.enter_context(contender([words], logs, threads)) for name, words in programs.items()}
        for program in up.values():
            program.ready()
        for number in range(rounds):
            for name, program in up.items():
                found[name] += program.ask(str(10 + number))
    return found


def decode(figures: Figures) -> float:
    """Tokens a second, by the median time of a token."""
    return 1 / float(statistics.median(figures["token_s"]))


def prefill(figures: Figures) -> float:
    """Tokens of the prompt a second."""
    return PROMPT / float(figures["prompt_s"])


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
`torch.sum` reads memory ({read} GB/s with one thread and with two, the most of what was read between the programs). A
token's time is the median of its reply's; figures are medians over {rounds} rounds by turns, and ratios the medians of
each round's. Peer: llama-cpp-python {version}, built on this machine."""
LIMITS = """- Random weights: speed does not depend on what they are.
- On a machine whose cores are shared, memory's speed changes from minute to minute. Ratios of single rounds:
  {spread}."""


def page(found: Mapping[str, Any]) -> Page:
    """The page of raw figures."""
    runs, limits, read = found["runs"], found["read_gb_s"], found["weight_bytes"]
    lines, spread = [TITLES], []
    for threads in THREADS:
        for form in read:
            own, peer = runs[f"tllm {form} {threads}"], runs.get(f"llama.cpp {form} {threads}")
            share = middle(own, decode) * read[form] / 1e9 / max(limits[str(threads)])
            beside = [("", "")] * 2
            if peer:
                by_rate = {of: ratios(own, peer, of) for of in (decode, prefill)}
                beside = [(f"{middle(peer, of):.1f}", f"{ratio:.2f}") for of, (_, ratio, _) in by_rate.items()]
                (least, _, most), (least_prompt, _, most_prompt) = by_rate.values()
                spread.append(
                    f"{form} with {threads} thread{'s' * (threads > 1)} {least:.2f} to {most:.2f}, prompts "
                    f"{least_prompt:.2f} to {most_prompt:.2f}"
                )
            (tokens, faster), (prompts, sooner) = beside
            line = [form, str(threads), f"{middle(own, decode):.1f}", tokens, faster, f"{100 * share:.0f} %"]
            lines.append([*line, f"{middle(own, prefill):.1f}", prompts, sooner])
    peers = [one["version"] for name, some in runs.items() if "llama" in name for one in some]
    numbers = dict(
        read=" and ".join(f"{max(speeds):.1f}" for speeds in limits.values()),
        rounds=len(next(iter(runs.values()))),
        version=peers[0] if peers else "was not there",
    )
    purpose = PURPOSE.format(parameters=parameters(found["size"]))
    kind, reading = found["kernels"], READING.format(**numbers)
    title = f"Serving: few bits, beside llama.cpp, kernels for {kind}"
    limits_of_page = LIMITS.format(spread="; ".join(spread) or "none")
    return Page("serving", f"few-bits-{kind}", title, purpose, table(lines, left=1), reading, limits_of_page)


def middle(figures: Sequence[Figures], of: Callable[[Figures], float]) -> float:
    """The median over rounds."""
    return statistics.median(map(of, figures))


def ratios(
    own: Sequence[Figures], peer: Sequence[Figures], of: Callable[[Figures], float]
) -> tuple[float, float, float]:
    """The least, the median and the most of the rounds' ratios."""
    each = [of(one) / of(other) for one, other in zip(own, peer, strict=True)]
    return min(each), statistics.median(each), max(each)


if __name__ == "__main__":
    main()
