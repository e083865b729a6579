"""Training, side by side in one run: `python benchmarks/training.py [--size 30m] [--rounds 5]`.

One process against a plain loop and `transformers`' own model; two processes of one thread each against torch's DDP and
FSDP2 on gloo. All see the same rows from the same weights, with AdamW and clipping; they take turns of a few steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from report import write
from shapes import SHAPES, model_folder
from turns import Contender, Report, contender

from tllm.cluster.certificates import Authority

HERE = Path(__file__).parent
ROWS = 96
SAME = 1e-5  # of a float32 loss: by how much contenders may differ that do the same work
Raw = dict[str, list[Report]]
Commands = dict[str, tuple[int, list[list[str]]]]
"""Of each contender the threads of a process, and its command lines, a rank each."""


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
        """Random ids: what is learned does not change how long a step takes."""
        path = self.root / f"rows-{self.size}-{self.length}.jsonl"
        if not path.exists():
            dice, vocab = random.Random(0), SHAPES[self.size]["vocab_size"]
            rows = [[dice.randrange(vocab) for _ in range(self.length)] for _ in range(ROWS)]
            path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))
        return path


def peer(work: Work, way: str, dtype: str, threads: int, ranks: int = 1, address: str = "127.0.0.1") -> list[list[str]]:
    """The command lines of one that is not ours, a rank each."""
    words = [sys.executable, str(HERE / "training_peers.py"), way, str(work.folder), str(work.rows), "--dtype", dtype]
    words += ["--batch", str(work.batch), "--threads", str(threads), "--ranks", str(ranks)]
    port = str(free_port())
    return [[*words, "--rank", str(rank), "--address", address, "--port", port] for rank in range(ranks)]


def ours(
    work: Work, plan: str, threads: int, ranks: int = 1, hosts: list[str] | None = None, tls: bool = True, **job: Any
) -> list[list[str]]:
    """The command lines of ours, a rank each; `job` are further fields of the job."""
    run = tempfile.mkdtemp(prefix="run-", dir=work.root)
    job = {"global_batch_size": work.batch * ranks, "microbatch_size": work.batch, **job}
    words = [sys.executable, str(HERE / "training_rank.py"), str(work.folder), str(work.rows), run, "--plan", plan]
    words += ["--threads", str(threads), "--job", json.dumps(job)]
    if ranks > 1:
        hosts = hosts or ["127.0.0.1"] * ranks
        words += ["--addresses", ",".join(f"{host}:{free_port()}" for host in hosts)]
    if ranks > 1 and tls:
        words += ["--identity", str(identity(Path(run)))]
    return [[*words, "--rank", str(rank)] for rank in range(ranks)]


def identity(folder: Path) -> Path:
    """A file with a certificate for the ranks of a run, and its key."""
    path = folder / "identity.json"
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(Authority.create().identity("bench")))
    return path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def contenders(commands: Commands, logs: Path, **env: str) -> Iterator[dict[str, Contender]]:
    """Each started and ready for its first turn."""
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
    """What each reports of a first step, which warms up, and of every round. The order turns round each time."""
    raw: Raw = {name: [] for name in started}
    for turn in range(rounds + 1):
        for name in list(started)[:: 1 if turn % 2 else -1]:
            raw[name].append(started[name].take(steps if turn else 1))
        print(f"round {turn} of {rounds}", flush=True)
    return raw


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
    what = f"Training {options.size}, {options.batch} rows of {options.length} tokens a step on each rank"
    tokens = options.batch * options.length
    write(f"training-{options.size}", what, table(raw, tokens), raw, ratios(raw) + "\n\n" + NOTES)


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def matches(work: Work, dtype: str) -> list[Commands]:
    """The contenders, in sets that take turns: as many at once as memory holds."""
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
NOTES = (
    "Medians over rounds; a ratio is the median of those of each round. bfloat16: the plain loop, `transformers` and "
    "DDP use autocast, FSDP2 its mixed precision with sums in float32, ours 16-bit weights beside float32 ones. Links "
    "of ours are plain TCP as gloo's are, or TLS as between nodes. Two ranks have one thread each."
)


def check_losses(raw: Raw) -> None:
    """All that learn from the same rows have the same losses, or they do not do the same work."""
    for name, rounds in raw.items():
        want = raw["tllm dp=2" if ranks_of(name) == 2 else "plain loop, threads: 1"]
        for mine, theirs in zip(rounds, want, strict=True):
            for got, loss in zip(mine["losses"], theirs["losses"], strict=True):
                assert abs(got / loss - 1) < SAME, f"{name} has a loss of {got} where another has {loss}"


def ranks_of(name: str) -> int:
    return 2 if "2 ranks" in name or "dp=2" in name else 1


def rates(raw: Raw, name: str, tokens: int) -> list[float]:
    """Tokens a second of every round."""
    return [tokens * ranks_of(name) * len(report["losses"]) / report["seconds"] for report in raw[name][1:]]


def table(raw: dict[str, Raw], tokens: int) -> str:
    lines = ["| tokens/s | " + " | ".join(raw) + " |", "|---" + "|--:" * len(raw) + "|"]
    for name in next(iter(raw.values())):
        cells = (f"{statistics.median(rates(of_dtype, name, tokens)):,.0f}" for of_dtype in raw.values())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratios(raw: dict[str, Raw]) -> str:
    """What is claimed and what is not."""
    lines = ["| ratio | " + " | ".join(raw) + " |", "|---" + "|--:" * len(raw) + "|"]
    for mine, theirs in PAIRS:
        cells = []
        for of_dtype in raw.values():
            both = zip(rates(of_dtype, mine, 1), rates(of_dtype, theirs, 1), strict=True)
            cells.append(f"{statistics.median(a / b for a, b in both):.2f}")
        lines.append(f"| {mine} / {theirs} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
