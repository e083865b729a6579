"""Samples a second of post-training beside TRL: `python -m benchmarks.training.post_training --peer-python PYTHON`.

SFT, DPO and GRPO, by `tllm train` and by TRL's trainers (GRPO with transformers' `generate`), one process each on the
processor. All start from the same weights, see the same rows in the same order and take turns of steps. PYTHON is that
of an environment with trl and the same torch.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.random_llama import SHAPES, SIZES, model_folder, parameters
from benchmarks.models.word_tokenizer import add_word_tokenizer, words
from benchmarks.processes.alternating_processes import Report
from benchmarks.processes.python_module import module_command
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import BENCHMARKS, Page, raw_of, write
from benchmarks.serving.throughput import read_rate
from benchmarks.training.throughput import Commands, Raw, contenders, made, take_turns
from tllm.kernels.library import compiled
from tllm.weights.dtypes import torch_dtype

TASKS = ("sft", "dpo", "grpo")
DTYPES = ("float32", "bfloat16")
AIMS = {"sft": 1.0, "dpo": 1.0, "grpo": 3.0}
THREADS, RATE = 2, 1e-5
SAME = {
    ("sft", "float32"): 1e-5,
    ("dpo", "float32"): 1e-4,
    ("sft", "bfloat16"): 1e-2,
    ("dpo", "bfloat16"): 5e-2,
}
"""Relative difference that the losses of a step may have, as far as rounding goes. The loss of a pair is that of a
difference of sums: 128 log-probabilities come to some -1,150, which float32 rounds by up to 6e-5, and bfloat16 rounds
the logits that they are made of."""

SAME_TASKS = ("sft", "dpo")
"""Tasks whose losses hang on no chance."""

OURS, PEER, ONCE = "tllm", "TRL", "TRL, reference once"


@dataclass(frozen=True)
class Rows:
    """What a task learns from: `count` rows of a prompt and of a text or replies of so many tokens; `batch` samples a
    step, of which each prompt has `generations`."""

    prompt: int
    reply: int
    batch: int
    generations: int = 1
    count: int = 24

    def write(self, task: str, path: Path, vocab: int) -> Path:
        """Rows of random words, the same at each call: what is learned does not change how long a step takes."""
        dice = random.Random(0)
        rows = [self._row(task, dice, vocab) for _ in range(self.count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def _row(self, task: str, dice: random.Random, vocab: int) -> dict[str, str]:
        if task == "sft":
            return {"text": words(dice, self.reply - 1, vocab)}  # and the token that ends it
        replies = ("chosen", "rejected") if task == "dpo" else ()
        row = {name: f" {words(dice, self.reply - 1, vocab)}" for name in replies}
        return {"prompt": words(dice, self.prompt, vocab), **row}


ROWS = {"sft": Rows(0, 256, 4), "dpo": Rows(64, 128, 4), "grpo": Rows(64, 64, 8, generations=8)}


def our_job(task: str, dtype: str, rows: Rows) -> dict[str, Any]:
    """What `tllm train` is asked for beside its defaults."""
    job = dict(
        task=task,
        dtype=dtype,
        learning_rate=RATE,
        weight_decay=0.0,
        global_batch_size=rows.batch,
        microbatch_size=rows.batch,
        seq_len={"sft": rows.reply, "dpo": 2 * (rows.prompt + rows.reply), "grpo": rows.prompt + rows.reply}[task],
    )
    if task == "grpo":
        function = Path(__file__).with_name("even_words.py")
        job["grpo"] = dict(
            reward_funcs=[f"{function}:even_words"],
            num_generations=rows.generations,
            max_completion_length=rows.reply,
        )
    return job


def commands(task: str, dtype: str, peer: str, folder: Path, root: Path) -> Commands:
    """Each contender's command, for a task in a dtype."""
    rows = ROWS[task]
    data = rows.write(task, root / f"{task}.jsonl", json.loads((folder / "config.json").read_text())["vocab_size"])
    job = json.dumps(our_job(task, dtype, rows))
    out = tempfile.mkdtemp(prefix=f"{task}-{dtype}-", dir=root)
    ours = module_command("training.tllm_rank", str(folder), str(data), out, "--job", job)
    theirs = dict(folder=str(folder), rows=str(data), out=f"{out}-trl", dtype=dtype, batch=rows.batch)
    theirs |= dict(length=rows.reply, generations=rows.generations, learning_rate=RATE)
    trl = [peer, *module_command("training.trl_trainers", task, json.dumps(theirs))[1:]]
    found = {OURS: ours, PEER: trl, **({ONCE: [*trl, "--precompute"]} if task == "dpo" else {})}
    return {name: (THREADS, [[*line, "--threads", str(THREADS)]]) for name, line in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="python of an environment that has trl")
    parser.add_argument("--size", default="60m", choices=tuple(SHAPES))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1, help="of each turn")
    parser.add_argument("--folders", type=Path, default=Path("/tmp/tllm-bench"), help="where model folders are kept")
    parser.add_argument("--more", action="store_true", help="replace these runs on the page that is there")
    options = parser.parse_args()
    folder = add_word_tokenizer(model_folder(options.size, made(options.folders), torch.float32))
    old = BENCHMARKS / "training" / "results" / f"{kind_of(options.size)}.md"
    found = raw_of(old) if options.more else {"size": options.size, "runs": {}}
    found["versions"] = versions(options.peer_python)
    found["read_rate"] = read_rate(THREADS)
    with tempfile.TemporaryDirectory(prefix="post-training-", dir=options.folders) as root:
        faults: list[str] = []
        for task in options.tasks:
            for dtype in options.dtypes:
                lines = commands(task, dtype, options.peer_python, folder, Path(root))
                with contenders(lines, Path(root, "logs"), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="0") as started:
                    raw = take_turns(started, options.steps, options.rounds)
                print(
                    task, dtype, {name: rates(reports, ROWS[task].batch) for name, reports in raw.items()}, flush=True
                )
                if found_unlike := unlike(task, dtype, raw):
                    faults += found_unlike
                else:
                    found["runs"].setdefault(task, {})[dtype] = raw
                    write(page(found), found)  # each time: a run that is stopped keeps what it has
    if faults:  # what does not do the same work is not on the page
        sys.exit("\n".join(faults))


def kind_of(size: str) -> str:
    """What the page of this processor is called."""
    return f"post-training-{size}-{compiled()[0].name}"


def versions(peer: str) -> str:
    """What the peer's environment holds."""
    words = "import trl, transformers, torch; print(trl.__version__, transformers.__version__, torch.__version__)"
    said = subprocess.run([peer, "-c", words], capture_output=True, text=True, check=True).stdout.split()
    return f"TRL {said[0]}, transformers {said[1]}, torch {said[2]}"


def unlike(task: str, dtype: str, raw: Raw) -> list[str]:
    """Why contenders do not do the same work: other losses, or completions of another length."""
    if task == "grpo":
        length = ROWS[task].reply
        return [
            f"{name} samples completions of {report['length'] / len(report['losses'])} tokens, not {length}"
            for name, reports in raw.items()
            for report in reports
            if report["length"] != length * len(report["losses"])
        ]
    return [
        f"{task} in {dtype}: {name} has a loss of {got} where {OURS} has {want}"
        for name, reports in raw.items()
        for report, ours in zip(reports, raw[OURS], strict=True)
        for got, want in zip(report["losses"], ours["losses"], strict=True)
        if abs(got / want - 1) > SAME[task, dtype]
    ]


def rates(reports: Sequence[Report], batch: int) -> list[float]:
    """Samples a second of every round but the one that warms up."""
    return [batch * len(report["losses"]) / report["seconds"] for report in reports[1:]]


def ratio(mine: Sequence[Report], theirs: Sequence[Report]) -> float:
    """How many times as fast we are, in the middle one of the rounds."""
    both = zip(rates(mine, 1), rates(theirs, 1), strict=True)
    return float(statistics.median(a / b for a, b in both))


TITLES = ["task", "dtype", "", "samples/s", "tllm beside it", "of a step: sampling"]
PURPOSE = """How fast SFT, DPO and GRPO go, by `tllm train` and by TRL's trainers ({versions}) with `generate` of
transformers, on the same random Llama of {parameters}: the same rows, batches, AdamW at the same rate, clipping of the
gradient's norm and {threads} threads. SFT: {sft.batch} texts of {sft.reply} tokens a step. DPO: {dpo.batch} pairs, a
prompt of {dpo.prompt} and replies of {dpo.reply}. GRPO: {grpo.batch} completions of {grpo.reply} tokens,
{grpo.generations} of each prompt of {grpo.prompt}; nothing ends one before, and the same function rewards them."""
READING = """A sample is a text, a pair or a completion. Contenders take turns of steps, so all meet the same noise of
the machine; medians over {rounds} rounds, a ratio is the median of the ratios of each round. That both do the same work
is checked in the run: the losses of each step of SFT and DPO differ by {off} at most (relative), and all completions of
GRPO have the same length; rewards of GRPO were {rewards} on average. `TRL` computes the reference of DPO anew in each
step, as is its default; `reference once` is its `precompute_ref_log_probs`, which is how tllm has it, and whose seconds
before the first step are counted for neither. Gradient checkpointing, TRL's default, is off, as it is in tllm. In
bfloat16 TRL has autocast (and its default of float32 weights), tllm 16-bit weights beside float32 ones.

{said}"""
LIMITS = """- The aims are 1.0 times TRL's rate for SFT and DPO, and 3 times for GRPO.{missed}{bound}
- Not run: {unrun}.
- No row is shorter than another, so nothing is gained by packing, which tllm has for all of these tasks.
- A small model, one process, no GPU, no vLLM beside TRL."""


def page(found: dict[str, Any]) -> Page:
    """The page of raw figures: reports of each contender, by task and dtype."""
    lines, said, missed = [TITLES], [], []
    for task, dtypes in found["runs"].items():
        for dtype, raw in dtypes.items():
            for name, reports in raw.items():
                times = ratio(raw[OURS], reports)
                lines.append([task.upper(), dtype, name, *cells(task, reports), ""])
                lines[-1][4:] = ["" if name == OURS else f"{times:.2f}", sampling(reports)]
                if name != OURS:
                    said.append(f"- {task.upper()} in {dtype}: {times:.2f} times {name}, {spread(raw[OURS], reports)}")
                if name != OURS and times < AIMS[task]:
                    missed.append(f"{task.upper()} in {dtype} has {times:.2f} ({name})")
    runs = found["runs"]
    rounds = max(len(reports) - 1 for dtypes in runs.values() for raw in dtypes.values() for reports in raw.values())
    purpose = PURPOSE.format(versions=found["versions"], parameters=parameters(found["size"]), threads=THREADS, **ROWS)
    off = " and ".join(
        f"{furthest(runs, dtype):.1g} in {dtype}"
        for dtype in DTYPES
        if any(dtype in runs.get(task, {}) for task in SAME_TASKS)
    )
    reading = READING.format(rounds=rounds, off=off, rewards=rewards(runs), said="\n".join(said))
    unrun = [f"{task.upper()} in {dtype}" for task in TASKS for dtype in DTYPES if dtype not in runs.get(task, {})]
    limits = LIMITS.format(
        missed=f" Short of them: {'; '.join(missed)}." if missed else " All that was run reaches them.",
        bound=bound(found),
        unrun=", ".join(unrun) or "nothing that was planned",
    )
    title = f"Post-training a model of {parameters(found['size'])}, beside TRL, kernels for {compiled()[0].name}"
    return Page("training", kind_of(found["size"]), title, purpose, table(lines, left=3), reading, limits)


def spread(mine: Sequence[Report], theirs: Sequence[Report]) -> str:
    """The ratios of single rounds, from the smallest to the largest."""
    found = [a / b for a, b in zip(rates(mine, 1), rates(theirs, 1), strict=True)]
    return f"{min(found):.2f} to {max(found):.2f} in single rounds"


def bound(found: dict[str, Any]) -> str:
    """What GRPO could reach here: learning takes a part of the step that no engine shortens, and each token of a reply
    reads all weights."""
    said, rate = [], found["read_rate"]
    for dtype, raw in found["runs"].get("grpo", {}).items():
        least = ROWS["grpo"].reply * weights_read(found["size"], dtype) / rate / 1e9
        free, read = (
            statistics.median(
                theirs["seconds"] / (mine["seconds"] - mine["sampling"] + len(mine["losses"]) * seconds)
                for mine, theirs in zip(raw[OURS][1:], raw[PEER][1:], strict=True)
            )
            for seconds in (0.0, least)
        )
        said.append(
            f" GRPO in {dtype} would reach {read:.1f} times if sampling took as long as reading the weights for each"
            f" token ({least:.2f} s a step at {rate:.1f} GB/s), and {free:.1f} times if it took no time."
        )
    return "".join(said)


def weights_read(size: str, dtype: str) -> int:
    """Bytes of the weights that a token's step reads: of all but the embedding, of which it reads a row."""
    width, layers, heads, shared, inner, words = (SHAPES[size][name] for name in SIZES)
    attention = 2 * width * width + 2 * width * (width // heads * shared)
    return (layers * (attention + 3 * width * inner) + width * words) * torch_dtype(dtype).itemsize


def cells(task: str, reports: Sequence[Report]) -> list[str]:
    return [f"{statistics.median(rates(reports, ROWS[task].batch)):.2f}"]


def sampling(reports: Sequence[Report]) -> str:
    """The part of a step's time in which completions are sampled."""
    share = statistics.median(report["sampling"] / report["seconds"] for report in reports[1:])
    return percent(share) if share else ""


def furthest(runs: dict[str, dict[str, Raw]], dtype: str) -> float:
    """The largest relative difference of a step's losses."""
    return max(
        (
            abs(got / want - 1)
            for task, dtypes in runs.items()
            if task != "grpo" and dtype in dtypes
            for reports in dtypes[dtype].values()
            for report, ours in zip(reports, dtypes[dtype][OURS], strict=True)
            for got, want in zip(report["losses"], ours["losses"], strict=True)
        ),
        default=0.0,
    )


def rewards(runs: dict[str, dict[str, Raw]]) -> str:
    """The mean reward of each contender's completions."""
    means: dict[str, list[float]] = {}
    for raw in runs.get("grpo", {}).values():
        for name, reports in raw.items():
            means.setdefault(name, []).extend(report["reward"] / len(report["losses"]) for report in reports)
    return " and ".join(f"{statistics.fmean(some):.3f} ({name})" for name, some in means.items()) or "not asked for"


if __name__ == "__main__":
    main()
