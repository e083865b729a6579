"""Tokens per second of training: `python -m benchmarks.training.throughput [--size 30m] [--rounds 5]`.

Compares tllm in one process with a plain PyTorch loop and with `transformers`' own model, and in two processes of one
thread each with torch's DDP and FSDP2 on gloo. All start from the same weights and see the same rows, with AdamW and
clipping of the gradient's norm. They take turns of a few steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.models.random_llama import SHAPES, model_folder, parameters
from benchmarks.processes.alternating_processes import Contender, Report, alternate, contender
from benchmarks.processes.python_module import free_port, module_command
from benchmarks.report import markdown
from benchmarks.report.results import Page, write
from tllm.cluster.certificates import Authority
from tllm.kernels.library import compiled

ROWS = 96
SAME = 1e-5  # relative difference of float32 losses that contenders may have which do the same work
Raw = dict[str, list[Report]]
Commands = dict[str, tuple[int, list[list[str]]]]
"""For each contender: the threads of a process, and the command line of each rank."""


@dataclass(frozen=True)
class Work:
    """What all contenders do: `batch` rows of `length` tokens a step on each rank. Files are kept under `root`."""

    size: str
    length: int
    batch: int
    root: Path

    @property
    def folder(self) -> Path:
        return model_folder(self.size, self.root, torch.float32)

    @property
    def rows(self) -> Path:
        """Rows of random ids: what is learned does not change how long a step takes."""
        path = self.root / f"rows-{self.size}-{self.length}.jsonl"
        if not path.exists():
            dice, vocab = random.Random(0), SHAPES[self.size]["vocab_size"]
            rows = [[dice.randrange(vocab) for _ in range(self.length)] for _ in range(ROWS)]
            path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))
        return path


def peer(work: Work, way: str, dtype: str, threads: int, ranks: int = 1, address: str = "127.0.0.1") -> list[list[str]]:
    """The command lines, one for each rank, of a trainer that is not ours."""
    words = module_command("training.torch_trainers", way, str(work.folder), str(work.rows), "--dtype", dtype)
    words += ["--batch", str(work.batch), "--threads", str(threads), "--ranks", str(ranks)]
    port = str(free_port())
    return [[*words, "--rank", str(rank), "--address", address, "--port", port] for rank in range(ranks)]


def ours(
    work: Work, plan: str, threads: int, ranks: int = 1, hosts: list[str] | None = None, tls: bool = True, **job: Any
) -> list[list[str]]:
    """The command lines of tllm, one for each rank; `job` are further fields of the job."""
    run = tempfile.mkdtemp(prefix="run-", dir=work.root)
    job = {"global_batch_size": work.batch * ranks, "microbatch_size": work.batch, **job}
    words = module_command("training.tllm_rank", str(work.folder), str(work.rows), run, "--plan", plan)
    words += ["--threads", str(threads), "--job", json.dumps(job)]
    if ranks > 1:
        hosts = hosts or ["127.0.0.1"] * ranks
        words += ["--addresses", ",".join(f"{host}:{free_port()}" for host in hosts)]
    if ranks > 1 and tls:
        words += ["--identity", str(identity(Path(run)))]
    return [[*words, "--rank", str(rank)] for rank in range(ranks)]


def identity(folder: Path) -> Path:
    """Write a certificate for the ranks of a run, and its key, to a file, and return its path."""
    path = folder / "identity.json"
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(Authority.create().identity("bench")))
    return path


@contextlib.contextmanager
def contenders(commands: Commands, logs: Path, **env: str) -> Iterator[dict[str, Contender]]:
    """Start every contender and wait until each is ready for its first turn."""
    print("start", *commands, sep="\n  ", flush=True)
    with contextlib.ExitStack() as stack:
        started = {
            name: stack.enter_context(contender(words, logs, threads, **env))
            for name, (threads, words) in commands.items()
        }
        for one in started.values():
            one.ready()
        yield started


def take_turns(started: dict[str, Contender], steps: int, rounds: int) -> Raw:
    """The reports of every contender: a step that warms up, then each round."""

    def turn_of(one: Contender) -> Callable[[int], Report]:
        return lambda turn: one.take(steps if turn else 1)

    return alternate({name: turn_of(one) for name, one in started.items()}, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="30m", choices=tuple(SHAPES))
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=2, help="rows of a step on each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of each turn")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--folders", type=Path, default=Path("/tmp/tllm-bench"), help="where model folders are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="training-", dir=made(options.folders)) as root:
        work = Work(options.size, options.length, options.batch, Path(root))
        raw: dict[str, Raw] = {}
        for dtype in options.dtypes:
            raw[dtype] = {}
            for commands in matches(work, dtype):
                with contenders(commands, Path(root, "logs")) as started:
                    raw[dtype] |= take_turns(started, options.steps, options.rounds)
        if "float32" in raw:
            check_losses(raw["float32"])
    write(page(options.size, raw, options.batch, options.length), raw)


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def matches(work: Work, dtype: str) -> list[Commands]:
    """The contenders in sets that take turns: each set fits into memory at once."""
    alone = [
        {
            f"plain loop, threads: {threads}": (threads, peer(work, "plain", dtype, threads)),
            f"transformers, threads: {threads}": (threads, peer(work, "transformers", dtype, threads)),
            f"tllm, threads: {threads}": (threads, ours(work, "pp=1", threads, dtype=dtype)),
        }
        for threads in (1, 2)
    ]
    together = [
        {
            f"{theirs}, 2 ranks": (1, peer(work, theirs.lower(), dtype, 1, 2)),
            f"tllm {plan}": (1, ours(work, plan, 1, 2, tls=False, dtype=dtype)),
            f"tllm {plan}, TLS": (1, ours(work, plan, 1, 2, dtype=dtype)),
        }
        for theirs, plan in (("DDP", "dp=2"), ("FSDP2", "dp=2,zero=3"))
    ]
    return alone + together


PAIRS = (
    ("tllm, threads: 1", "plain loop, threads: 1"),
    ("tllm, threads: 1", "transformers, threads: 1"),
    ("tllm, threads: 2", "plain loop, threads: 2"),
    ("tllm, threads: 2", "transformers, threads: 2"),
    ("tllm dp=2", "DDP, 2 ranks"),
    ("tllm dp=2, TLS", "DDP, 2 ranks"),
    ("tllm dp=2,zero=3", "FSDP2, 2 ranks"),
    ("tllm dp=2,zero=3, TLS", "FSDP2, 2 ranks"),
)
PURPOSE = """Tokens per second of training, tllm beside what a user would write or take instead: a plain PyTorch loop,
`transformers`' own model, DDP and FSDP2 on gloo. Each rank computes {batch} rows of {length} tokens a step, with AdamW
and clipping of the gradient's norm. All start from the same random weights and train on the same rows; in float32 their
losses are checked to be equal within 1e-5."""
READING = """Contenders take turns of a few steps, so all meet the same noise of the machine. Medians over rounds; a
ratio is the median of the ratios of each round. In bfloat16 the plain loop, `transformers` and DDP use autocast, FSDP2
its mixed precision with sums in float32, and tllm 16-bit weights beside float32 ones. Links of tllm are plain TCP, as
gloo's are, or mutual TLS, as between nodes. Two ranks have one thread each, on this machine."""
LIMITS = """- Two busy ranks on two cores leave none for encryption, and the gradients of all weights are much to send
  for so few tokens a step.
- A small model, two ranks, one machine, no GPU."""


def page(size: str, raw: dict[str, Raw], batch: int, length: int) -> Page:
    """The page of raw figures: of each dtype the reports of each contender."""
    found = ratios(raw)
    behind = [row for row in found[1:] if min(map(float, row[1:])) < 1]
    listed = "\n".join(f"- {name}: {', '.join(values)} ({', '.join(raw)})." for name, *values in behind)
    limits = f"Ratios of which one is below 1:\n\n{listed}\n{LIMITS}" if behind else LIMITS
    body = f"{table(raw, batch * length)}\n\n{markdown.table(found)}"
    reading = f"{conclusions(found)}\n\n{READING}"
    kind = compiled()[0].name
    title = f"Training a model of {parameters(size)}, kernels for {kind}"
    purpose = PURPOSE.format(batch=batch, length=length)
    return Page("training", f"training-{size}-{kind}", title, purpose, body, reading, limits)


def conclusions(found: list[list[str]]) -> str:
    """The range of the ratios beside each of the others, over dtypes and threads or kinds of links."""
    spans = []
    for theirs in ("plain loop", "transformers", "DDP", "FSDP2"):
        values = sorted(value for name, *of in found[1:] for value in of if f"/ {theirs}" in name)
        spans.append(f"{values[0]} to {values[-1]} times the rate of {theirs}")
    return f"tllm trains at {', '.join(spans)}, over both dtypes, threads and kinds of links."


def check_losses(raw: Raw) -> None:
    """Contenders that train on the same rows must have the same losses, or they do not do the same work."""
    for name, rounds in raw.items():
        want = raw["tllm dp=2" if ranks_of(name) == 2 else "plain loop, threads: 1"]
        for mine, theirs in zip(rounds, want, strict=True):
            for got, loss in zip(mine["losses"], theirs["losses"], strict=True):
                assert abs(got / loss - 1) < SAME, f"{name} has a loss of {got} where another has {loss}"


def ranks_of(name: str) -> int:
    return 2 if "2 ranks" in name or "dp=2" in name else 1


def rates(raw: Raw, name: str, tokens: int) -> list[float]:
    """Tokens per second of every round but the one that warms up."""
    return [tokens * ranks_of(name) * len(report["losses"]) / report["seconds"] for report in raw[name][1:]]


def table(raw: dict[str, Raw], tokens: int) -> str:
    """The median tokens per second of each contender, a column for each dtype."""
    rows = [["tokens/s", *raw]]
    for name in next(iter(raw.values())):
        cells = (f"{statistics.median(rates(of_dtype, name, tokens)):,.0f}" for of_dtype in raw.values())
        rows.append([name, *cells])
    return markdown.table(rows)


def ratios(raw: dict[str, Raw]) -> list[list[str]]:
    """How many times as fast as another each of ours is, a column for each dtype; titles first."""
    rows = [["ratio", *raw]]
    for mine, theirs in PAIRS:
        cells = []
        for of_dtype in raw.values():
            both = zip(rates(of_dtype, mine, 1), rates(of_dtype, theirs, 1), strict=True)
            cells.append(f"{statistics.median(a / b for a, b in both):.2f}")
        rows.append([f"{mine} / {theirs}", *cells])
    return rows


if __name__ == "__main__":
    main()
