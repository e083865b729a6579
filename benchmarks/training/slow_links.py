"""Training over slow links: `python -m benchmarks.training.slow_links [TEXT_FILE]` (as root).

Two network namespaces with one thread each. First: how much of the communication of data parallelism is hidden behind
the computation, tllm beside DDP and FSDP2, from the seconds of computing alone, of the sums alone, and of both. Then,
at 100 Mbit/s: how many tokens per second compressed, delayed and rare sums gain; and with a text file what they cost
in loss, trained on a smaller model over the same link.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.models.random_llama import SHAPES, parameters
from benchmarks.processes.alternating_processes import Contender, Report
from benchmarks.report.markdown import percent
from benchmarks.report.results import Page, write
from benchmarks.training.throughput import Raw, Work, contenders, made, ours, peer, take_turns
from tests.support.cluster.hosts import Hosts, why_not

Ranks = dict[str, list[list[str]]]
"""For each contender the command line of each rank."""

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
    """Rows are bytes of a text, each used once; there are enough for `steps` steps of two ranks."""

    text: Path
    steps: int

    @property
    def rows(self) -> Path:
        path = self.root / "text.jsonl"
        if not path.exists():
            text, wanted = self.text.read_bytes(), self.steps * self.batch * 2
            stride = (len(text) - self.length) // wanted
            places = sorted(
                range(wanted), key=lambda row: row * 7919 % wanted
            )  # so that neighbouring rows of the text are far apart
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
    settings = {name: getattr(options, name) for name in ("batch", "length", "learner", "learner_steps")}
    raw = {"settings": settings, "overlap": overlaps, "less": less, "learned": learned}
    write(page(options.size, raw), raw)


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
    """Turns of each trainer: computing alone, summing alone, and training."""

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
    """The reports of one of the `WAYS` over turns of so many steps."""

    def commands(hosts: Hosts) -> Ranks:
        return {name: ours(work, "dp=2", 1, 2, hosts.addresses, **job)}

    with over(SLOW, work, commands) as started:
        return [started[name].take(count) for count in steps]


def send_less(work: Work) -> Raw:
    """The reports of every way: a turn that warms up and one that counts. Local steps are counted up to their sum."""
    return {name: turns(work, name, job, *((EVERY, EVERY) if name == LOCAL else (2, 1))) for name, job in WAYS.items()}


def learn(work: TextWork) -> Raw:
    """The losses of every way and the seconds that it took."""
    return {name: turns(work, name, {**SETTINGS, **job}, work.steps) for name, job in WAYS.items()}


def overlap_table(rate: str, raw: Raw) -> str:
    lines = [
        f"| {rate}/s, s a step | bytes / rate | computing alone | sums alone | both at best | both | hidden |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    wire = 8 * raw["tllm, sums alone"][-1]["sent"] / BITS[rate]
    for name, both in (("tllm", "tllm dp=2"), ("DDP", "DDP")):
        compute, sums, together = times_of(raw, name, both)
        times = " | ".join(f"{time:.2f}" for time in (wire, compute, sums, max(compute, sums), together))
        lines.append(f"| {both} | {times} | {100 * hidden(compute, sums, together):.0f} % |")
    for name in ("tllm dp=2,zero=3", "FSDP2"):
        if name in raw:
            lines.append(f"| {name} | | | | | {seconds(raw[name]):.2f} | |")
    return "\n".join(lines)


def times_of(raw: Raw, name: str, both: str) -> tuple[float, float, float]:
    """Seconds of a step of computing alone, of the sums alone, and of both."""
    compute, sums, together = (seconds(raw[key]) for key in (f"{name}, computing alone", f"{name}, sums alone", both))
    return compute, sums, together


def price_of(learned: Raw, name: str) -> float:
    """How much higher the loss of a way is than with exact sums, relative to it."""
    return last(learned[name][0]["losses"]) / last(learned["exact"][0]["losses"]) - 1


def hidden(compute: float, sums: float, both: float) -> float:
    """The share of the shorter of two times that runs beside the longer: 1 where it costs no time, 0 where all."""
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
            price = percent(price_of(learned, name), sign=True)
            cells += [f"{losses[name]:.3f}", price, f"{learned[name][0]['seconds']:.1f}"]
        lines.append(f"| {name} | " + " | ".join(cells + [""] * (6 - len(cells))) + " |")
    return "\n".join(lines)


def seconds(reports: list[dict[str, Any]]) -> float:
    """Median seconds of a step in the turns after the first."""
    steps: list[float] = [report["seconds"] / len(report["losses"]) for report in reports[1:]]
    return statistics.median(steps)


def last(losses: list[float]) -> float:
    """The mean of the last fifth of the losses."""
    return statistics.fmean(losses[-max(len(losses) // 5, 1) :])


PURPOSE = """Whether tllm hides the communication of data parallelism behind the computation as DDP does, and what
sending less gains and costs over a slow link. Two network namespaces of one thread each train in float32, {batch} rows
of {length} tokens on each rank; tllm over mutual TLS, gloo not encrypted."""
READING = """`hidden` is the share of the shorter of computing and summing that costs no time beside the longer.
Computing alone is done in both namespaces at once. Bytes are those that one rank sends, rows included. `times exact`
compares tokens/s with exact sums."""
LOSSES = """ Losses are those of a model of {named} after {learner_steps} steps of 16 rows of 128 bytes: the mean of the
last fifth, each row seen once. `s to it` is how long these steps took over the link."""
LIMITS = """- Losses come from a short run of a very small model with one seed: an order of magnitude, no promise.
- Delayed sums were run at the learning rate of the others, which is too high for them.
- Two namespaces share two cores, so sending and computing compete for them."""


def page(size: str, raw: dict[str, Any]) -> Page:
    """The page of raw figures: `overlap` at each rate, `less` and `learned` for each way, and the `settings`."""
    settings = raw["settings"]
    tables = [overlap_table(rate, of_rate) for rate, of_rate in raw["overlap"].items()]
    tables.append(less_table(raw["less"], raw["learned"], settings["batch"] * settings["length"] * 2))
    reading = f"{conclusions(raw)}\n\n{READING}" + (
        LOSSES.format(**settings, named=parameters(settings["learner"])) if raw["learned"] else ""
    )
    title = f"Training a model of {parameters(size)} over slow links"
    body = "\n\n".join(tables)
    return Page(
        "training", f"slow-links-{size}", title, PURPOSE.format(**settings), body, reading, f"{hiding(raw)}\n{LIMITS}"
    )


def conclusions(raw: dict[str, Any]) -> str:
    """What sending less gains at 100 Mbit/s, and its price in loss where that was measured."""
    exact = seconds(raw["less"]["exact"])
    said = []
    for name, reports in raw["less"].items():
        if name != "exact":
            price = percent(price_of(raw["learned"], name), sign=True) if raw["learned"] else "not measured"
            said.append(f"{name}: {exact / seconds(reports):.2f} (loss {price})")
    return f"Times the tokens/s of exact sums at 100 Mbit/s. {'; '.join(said)}."


def hiding(raw: dict[str, Any]) -> str:
    """How much of the shorter time tllm and DDP hide at each rate."""
    said = []
    for rate, of_rate in raw["overlap"].items():
        parts = (hidden(*times_of(of_rate, name, both)) for name, both in (("tllm", "tllm dp=2"), ("DDP", "DDP")))
        ours, theirs = (f"{100 * part:.0f} %" for part in parts)
        said.append(f"at {rate}/s tllm hides {ours} of the shorter of computing and summing, DDP {theirs}")
    return f"- Overlap: {'; '.join(said)}."


if __name__ == "__main__":
    main()
