"""Training over slow links: `python benchmarks/slow_links.py [TEXT_FILE]` (as root: it makes network namespaces).

Two hosts, one thread each. First how much of the communication of data parallel is hidden behind the computing, ours
beside DDP and FSDP2: the computing alone, the sums alone, both. Then, at 100 Mbit/s, what the ways that send less gain
in tokens/s; and with a text what they cost in loss, learned by a smaller model over the same link.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import write
from shapes import SHAPES
from training import Raw, Work, contenders, made, ours, peer, take_turns
from turns import Contender, Report

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.hosts import Hosts, why_not

Ranks = dict[str, list[list[str]]]
"""The command lines of each contender, a rank each."""

BITS = {"1gbit": 1e9, "100mbit": 1e8}
SLOW = "100mbit"
EVERY = 10
LOCAL = f"{EVERY} local steps"
WAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "bf16": {"gradient_compression": "bf16"},
    "int8": {"gradient_compression": "int8"},
    "PowerSGD, rank 4": {"gradient_compression": "powersgd"},
    "delayed": {"delay_steps": 1},
    "delayed int8": {"delay_steps": 1, "gradient_compression": "int8"},
    LOCAL: {"local_steps": EVERY},
}
SETTINGS = {"learning_rate": 3e-3, "adam_beta2": 0.95, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 20}


@dataclass(frozen=True)
class TextWork(Work):
    """Rows are bytes of a text, each once; `steps` of them for two ranks."""

    text: Path
    steps: int

    @property
    def rows(self) -> Path:
        path = self.root / "text.jsonl"
        if not path.exists():
            text, wanted = self.text.read_bytes(), self.steps * self.batch * 2
            stride = (len(text) - self.length) // wanted
            places = sorted(range(wanted), key=lambda row: row * 7919 % wanted)  # neighbours come far apart
            rows = (list(text[row * stride :][: self.length]) for row in places)
            path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))
        return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="?", help="what the smaller model learns")
    parser.add_argument("--size", default="30m", choices=tuple(SHAPES))
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=2, help="rows of a step on each rank")
    parser.add_argument("--rounds", type=int, default=3, help="at 1 Gbit/s; a slower link needs one")
    parser.add_argument("--learner", default="1m", choices=tuple(SHAPES), help="the smaller model")
    parser.add_argument("--learner-steps", type=int, default=100)
    parser.add_argument("--folders", type=Path, default=Path("/tmp/tllm-bench"), help="where model folders are kept")
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory(prefix="slow-", dir=made(options.folders)) as root:
        work = Work(options.size, options.length, options.batch, Path(root))
        overlaps = {rate: overlap(work, rate, options.rounds if rate == "1gbit" else 1) for rate in BITS}
        less = send_less(work)
        text = TextWork(options.learner, 128, 8, Path(root), options.text, options.learner_steps)
        learned = learn(text) if options.text else {}
    tokens = options.batch * options.length * 2
    tables = "\n\n".join(
        [*(overlap_table(rate, raw) for rate, raw in overlaps.items()), less_table(less, learned, tokens)]
    )
    what = f"Training {options.size} over slow links, two hosts of one thread"
    raw = {"overlap": overlaps, "less": less, "learned": learned}
    write(f"slow-links-{options.size}", what, tables, raw, notes(options))


@contextmanager
def over(rate: str, work: Work, commands_of: Callable[[Hosts], Ranks]) -> Iterator[dict[str, Contender]]:
    """Contenders whose first rank is on one host and whose second is on another, joined at `rate`."""
    with Hosts(2, rate=rate) as hosts:
        commands = {
            name: (1, [hosts.command(host, *words) for host, words in enumerate(ranks)])
            for name, ranks in commands_of(hosts).items()
        }
        with contenders(commands, work.root / "logs", GLOO_SOCKET_IFNAME="eth0") as started:
            yield started


def overlap(work: Work, rate: str, rounds: int) -> Raw:
    """Turns of each way computing alone, summing alone, and training."""

    def commands(hosts: Hosts) -> Ranks:
        at, first = hosts.addresses, hosts.addresses[0]
        found = {
            "tllm, computing alone": [*ours(work, "pp=1", 1), *ours(work, "pp=1", 1)],
            "tllm, sums alone": [[*words, "--sums"] for words in ours(work, "dp=2", 1, 2, at)],
            "tllm dp=2": ours(work, "dp=2", 1, 2, at),
            "DDP, computing alone": [*peer(work, "plain", "float32", 1), *peer(work, "plain", "float32", 1)],
            "DDP, sums alone": peer(work, "sums", "float32", 1, 2, first),
            "DDP": peer(work, "ddp", "float32", 1, 2, first),
        }
        if rate != SLOW:
            found["tllm dp=2,zero=3"] = ours(work, "dp=2,zero=3", 1, 2, at)
            found["FSDP2"] = peer(work, "fsdp2", "float32", 1, 2, first)
        return found

    with over(rate, work, commands) as started:
        return take_turns(started, 1, rounds)


def turns(work: Work, name: str, job: dict[str, Any], *steps: int) -> list[Report]:
    """What one of the ways reports of so many steps, each time."""

    def commands(hosts: Hosts) -> Ranks:
        return {name: ours(work, "dp=2", 1, 2, hosts.addresses, **job)}

    with over(SLOW, work, commands) as started:
        return [started[name].take(count) for count in steps]


def send_less(work: Work) -> Raw:
    """What every way reports of steps that warm up and of steps that count: of local ones as many as end in a sum."""
    return {name: turns(work, name, job, *((EVERY, EVERY) if name == LOCAL else (2, 1))) for name, job in WAYS.items()}


def learn(work: TextWork) -> Raw:
    """The losses of every way, and the seconds that it took."""
    return {name: turns(work, name, {**SETTINGS, **job}, work.steps) for name, job in WAYS.items()}


def overlap_table(rate: str, raw: Raw) -> str:
    lines = [
        f"| {rate}/s, s a step | bytes / rate | computing alone | sums alone | both at best | both | hidden |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    wire = 8 * raw["tllm, sums alone"][-1]["sent"] / BITS[rate]
    for name, both in (("tllm", "tllm dp=2"), ("DDP", "DDP")):
        compute, sums, together = (
            seconds(raw[key]) for key in (f"{name}, computing alone", f"{name}, sums alone", both)
        )
        times = " | ".join(f"{time:.2f}" for time in (wire, compute, sums, max(compute, sums), together))
        lines.append(f"| {both} | {times} | {100 * hidden(compute, sums, together):.0f} % |")
    for name in ("tllm dp=2,zero=3", "FSDP2"):
        if name in raw:
            lines.append(f"| {name} | | | | | {seconds(raw[name]):.2f} | |")
    return "\n".join(lines)


def hidden(compute: float, sums: float, both: float) -> float:
    """How much less both take than one after the other, as a part of the shorter: 1 where that costs no time at all."""
    return (compute + sums - both) / min(compute, sums)


def less_table(less: Raw, learned: Raw, tokens: int) -> str:
    lines = [
        "| 100 Mbit/s | tokens/s | times exact | bytes a step | loss | against exact | s to it |",
        "|---" * 7 + "|",
    ]
    rates = {name: tokens / seconds(reports) for name, reports in less.items()}
    losses = {name: last(reports[0]["losses"]) for name, reports in learned.items()}
    for name, reports in less.items():
        sent = reports[-1]["sent"] / len(reports[-1]["losses"])
        cells = [f"{rates[name]:,.0f}", f"{rates[name] / rates['exact']:.2f}", f"{sent:,.0f}"]
        if losses:
            price = 100 * (losses[name] / losses["exact"] - 1)
            cells += [f"{losses[name]:.3f}", f"{price:+.1f} %", f"{learned[name][0]['seconds']:.1f}"]
        lines.append(f"| {name} | " + " | ".join(cells + [""] * (6 - len(cells))) + " |")
    return "\n".join(lines)


def seconds(reports: list[dict[str, Any]]) -> float:
    """The median of a step in the turns after the first."""
    return statistics.median(report["seconds"] / len(report["losses"]) for report in reports[1:])


def last(losses: list[float]) -> float:
    """The mean of the last fifth."""
    return statistics.fmean(losses[-max(len(losses) // 5, 1) :])


def notes(options: argparse.Namespace) -> str:
    text = (
        f"float32, {options.batch} rows of {options.length} tokens on each rank; ours by TLS, gloo without. Computing "
        "alone is done on both hosts at once. Hidden is what both take less than one after the other, of the shorter. "
        "Bytes are those that one rank sends, rows included."
    )
    if options.text:
        text += (
            f" Losses are of a {options.learner} model after {options.learner_steps} steps of 16 rows of 128 bytes, "
            "the mean of the last fifth, each row seen once; `s to it` is how long these steps took over the link."
        )
    return text


if __name__ == "__main__":
    main()
