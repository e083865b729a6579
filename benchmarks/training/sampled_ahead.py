"""Steps of GRPO that another process samples, in turn and ahead: `python -m benchmarks.training.sampled_ahead`.

`tllm train` and one `tllm rollout`, a thread each, with `max_staleness` of 0 and 1. Needs two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.models.random_llama import SHAPES, model_folder, parameters
from benchmarks.models.word_tokenizer import add_word_tokenizer
from benchmarks.processes.python_module import environment
from benchmarks.report.markdown import table
from benchmarks.report.results import BENCHMARKS, Page, write
from benchmarks.training.post_training import Rows
from benchmarks.training.throughput import made
from tllm.training.report.metrics import FILE, StepRecord, read_records

KIND = "sampled-ahead"
STALENESS = (0, 1)
WARM = 3
"""Steps at the beginning that are not counted: weights travel whole, and what is sampled ahead is not there yet."""

ROWS = Rows(prompt=32, reply=96, batch=16, generations=8)


def job_of(folder: Path, root: Path, address: str, staleness: int, steps: int) -> Path:
    """The job's file; `mirror_steps = 0`, as nothing is to be found again here."""
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    data = ROWS.write("grpo", root / "rows.jsonl", vocab)
    file = root / f"job-{staleness}.toml"
    file.write_text(
        f"""
task = "grpo"
model_name_or_path = "{folder}"
train_files = ["{data}"]
output_dir = "{root}/run-{staleness}"
max_steps = {steps}
seq_len = {ROWS.prompt + ROWS.reply}
global_batch_size = {ROWS.batch}
microbatch_size = 4
learning_rate = 1e-4
mirror_steps = 0
[grpo]
reward_funcs = ["{BENCHMARKS / "training" / "even_words.py"}:even_words"]
num_generations = {ROWS.generations}
max_completion_length = {ROWS.reply}
rollout_servers = ["{address}"]
rollout_secret = "{root}/key"
max_staleness = {staleness}
"""
    )
    return file


@contextmanager
def server(folder: Path, root: Path) -> Iterator[str]:
    """`tllm rollout` on one thread; its address."""
    line = [sys.executable, "-m", "tllm.cli", "rollout", str(folder), "--threads", "1", "--secret", str(root / "key")]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            assert process.stdout is not None
            said = iter(process.stdout.readline, "")
            yield next(found[1] for text in said if (found := re.search(r"samples at (\S+:\d+)", text)))
        finally:
            process.terminate()


def measured(folder: Path, root: Path, staleness: int, steps: int) -> list[StepRecord]:
    """The steps of one run."""
    with server(folder, root) as address:
        job = job_of(folder, root, address, staleness, steps)
        line = [sys.executable, "-m", "tllm.cli", "train", str(job), "--threads", "1"]
        subprocess.run(line, check=True, env=environment(), stdout=subprocess.DEVNULL)
    return read_records(root / f"run-{staleness}" / FILE)


def medians(records: list[StepRecord]) -> dict[str, float]:
    """Of the steps that count."""
    counted = records[WARM:]

    def middle(values: Iterator[float]) -> float:
        return float(statistics.median(values))

    waited = [(one.role_seconds or {})["sampling"] for one in counted]
    metrics = [one.metrics or {} for one in counted]
    return {
        "step": middle(one.seconds for one in counted),
        "waited": middle(iter(waited)),
        "learned": middle(one.seconds - wait for one, wait in zip(counted, waited, strict=True)),
        "sampled": middle(one["rollout/server_seconds"] for one in metrics),
        "ratio": middle(one["sampling/importance_sampling_ratio/max"] for one in metrics),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="30m", choices=tuple(SHAPES))
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--folders", type=Path, default=Path("/tmp/tllm-bench"), help="where model folders are kept")
    options = parser.parse_args()
    folder = add_word_tokenizer(model_folder(options.size, made(options.folders), torch.float32))
    with tempfile.TemporaryDirectory(prefix="sampled-ahead-", dir=options.folders) as root:
        found = {
            str(staleness): medians(measured(folder, Path(root), staleness, options.steps)) for staleness in STALENESS
        }
    write(page(options.size, options.steps, found), {"size": options.size, "steps": options.steps, "runs": found})


def page(size: str, steps: int, found: dict[str, dict[str, float]]) -> Page:
    """What is said of a run."""
    base = found["0"]
    longest = max(base["learned"], base["waited"])
    titles = [
        "max_staleness",
        "seconds a step",
        "of it waiting for completions",
        "the server's seconds",
        "times as fast",
    ]
    rows = [
        [name, *(f"{one[key]:.2f}" for key in ("step", "waited", "sampled")), f"{base['step'] / one['step']:.2f}"]
        for name, one in found.items()
    ]
    return Page(
        subject="training",
        kind=KIND,
        title=f"Steps of GRPO that are sampled ahead, {parameters(size)}",
        purpose=f"How long a step takes where a second process samples, while the trainer waits and while it learns. "
        f"{ROWS.batch} completions of {ROWS.reply} tokens a step, {ROWS.generations} of each prompt of {ROWS.prompt}; "
        "float32, one thread for `tllm train` and one for `tllm rollout`, links over TLS on loopback.",
        table=table([titles, *rows]),
        meaning=f"Medians of the steps {WARM + 1} to {steps}. In turn a step is {base['learned']:.2f} s of learning "
        f"and {base['waited']:.2f} s of waiting, so that {longest:.2f} s are to be expected at best at once: with "
        f"`max_staleness = 1` it is {found['1']['step']:.2f} s, of which the trainer takes {found['1']['waited']:.2f} "
        "s to bring its weights together, to hash them, and to wait. The server's seconds have the weights' way to it, "
        "which is hidden from the trainer and not from the server. The largest ratio of a token's probability by "
        f"weights one step newer is {found['1']['ratio']:.2f}, at a learning rate of 1e-4 that falls linearly.",
        limits="One run of each, one server, one machine: both processes share its caches and memory. Sampling takes "
        "alike long in each step here, so that two steps ahead would gain nothing more. What older weights cost in "
        "reward was not measured.",
    )


if __name__ == "__main__":
    main()
