"""A teacher on one machine and its student on another: `python -m benchmarks.training.distillation` (as root).

Two network namespaces with a processor and a thread each: `tllm teach` and `tllm train` over 100 Mbit/s, without and
with a delay. Counted at the interface: bytes for each token that is learned, beside all logits. Timed: a step beside
the longer of what teacher and student take alone, each at the same time on its own processor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import torch

from benchmarks.models.peaked_llama import peaked_folder
from benchmarks.models.random_llama import SHAPES, model_folder, parameters
from benchmarks.processes.python_module import environment, module_command
from benchmarks.report.markdown import percent, table
from benchmarks.report.results import Page, write
from benchmarks.training.throughput import made
from tests.support.cluster.hosts import Hosts, why_not
from tllm.comm.links import frame
from tllm.model.layer import Observe, unobserved
from tllm.text.same_vocabulary import vocabulary_digest
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.packing import PackedRow
from tllm.training.questions.answering_model import AnsweringModel
from tllm.training.report.metrics import FILE, StepRecord, read_records
from tllm.training.step.frozen_model import FrozenModel
from tllm.training.teachers.teacher_messages import Lesson, LogProbDtype, Question, packed
from tllm.training.teachers.teacher_model import TeacherModel
from tllm.training.teachers.top_k_choice import entropy
from tllm.weights.byte_source import LocalFiles

VOCABULARY = 32_000
LOGITS = 2 * VOCABULARY
"""Bytes of all logits of a token, in two bytes each."""

FEWER, OVERLAP = 50, 0.85
"""Aims: times fewer bytes than `LOGITS`, and the longer of teacher and student alone beside a step."""

STUDENT, TEACHER = 0, 1
"""The hosts, and the processor that each has for itself."""

BUDGETS = (0.1, 0.2)
COUNTED_ROWS, COUNTED_LENGTH, COUNTED_TOP_K = 4, 128, 4096
"""Rows, and their tokens, of which it is counted what a budget lets a teacher send: of each place so many at most."""

PORT = 7070
SECONDS = 300.0
TOGETHER, APART, SHORT, DELAYED, WHOLE = "100 Mbit/s", "apart", "queue of one", "delayed", "all logits"

Figures = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """Rows of random ids: what is learned does not change how long a step takes. Files are kept under `root`."""

    student: Path
    teacher: Path
    root: Path
    options: argparse.Namespace
    rows: int = 32
    length: int = 128
    batch: int = 4

    def job(self, name: str, address: str, top_k: int, steps: int) -> Path:
        """The file of a job that learns from the teacher at an address."""
        file, data = self.root / f"{name}.toml", self.root / "rows.jsonl"
        if not data.exists():
            dice = random.Random(0)
            lines = [[dice.randrange(3, VOCABULARY) for _ in range(self.length)] for _ in range(self.rows)]
            data.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in lines))
        file.write_text(
            f"""
task = "distill"
model_name_or_path = "{self.student}"
train_files = ["{data}"]
output_dir = "{self.root}/{name}"
max_steps = {steps}
save_steps = {steps}
seq_len = {self.length}
global_batch_size = {self.batch}
microbatch_size = {self.batch}
learning_rate = 1e-4
shuffle = false
packing = false
mirror_steps = 0
[distill]
teachers = ["{address}"]
teacher_secret = "{self.secret}"
top_k = {top_k}
kl_budget = {self.options.budget if top_k else 0.0}
log_prob_dtype = "{self.options.log_probs if top_k else "float32"}"
"""
        )
        return file

    @property
    def secret(self) -> Path:
        return self.root / "teacher.key"

    @property
    def answers(self) -> Path:
        return self.root / "answers"


@dataclass(frozen=True)
class Place:
    """Two hosts, joined, with `tllm teach` on the second of them."""

    hosts: Hosts
    work: Work

    @property
    def address(self) -> str:
        return f"{self.hosts.addresses[TEACHER]}:{PORT}"

    def start(self, host: int, name: str, *words: str, pinned: bool = True) -> subprocess.Popen[bytes]:
        """A process on a host, on the host's processor."""
        pin = ["taskset", "-c", str(host)] if pinned and (os.cpu_count() or 1) > 1 else []
        log = self.work.root / f"{name}.log"
        return self.hosts.start(host, *pin, *words, env=environment(), log=log)

    def teach(self) -> None:
        words = ["teach", str(self.work.teacher), "--host", self.hosts.addresses[TEACHER], "--port", str(PORT)]
        self.start(TEACHER, "teach", *tllm(*words, "--threads", "1", "--secret", str(self.work.secret)))

    def peer(self, host: int, what: str, job: Path, *words: str) -> subprocess.Popen[bytes]:
        command = module_command("training.distilled_peer", what, str(job), "--rows", str(self.work.rows), *words)
        return self.start(host, what, *command, pinned=what == "student")

    def keep(self) -> None:
        """The answers to all rows, for those who have them at hand."""
        job = self.work.job("keep", self.address, self.work.options.top_k, 1)
        finish(self.peer(TEACHER, "keep", job, "--answers", str(self.work.answers)), self.work.root / "keep.log")

    def learn(self, name: str, top_k: int, steps: int, address: str = "", short: bool = False) -> Figures:
        """A run of the student's: its steps, and what crossed its interface."""
        job = self.work.job(name, address or self.address, top_k, steps)
        before = traffic(self.hosts, STUDENT)
        if short:
            process, log = self.peer(STUDENT, "student", job), "student"
        else:
            log = f"train-{name}"
            process = self.start(STUDENT, log, *tllm("train", str(job), "--threads", "1"))
        finish(process, self.work.root / f"{log}.log")
        after = traffic(self.hosts, STUDENT)
        counted = {key: after[key] - before[key] for key in after}
        return figures(read_records(self.work.root / name / FILE), self.work, counted)

    def apart(self, name: str) -> Figures:
        """Student and teacher alone, at the same time: the one has all answers at hand, the other is asked by a
        program that does nothing."""
        options, root = self.work.options, self.work.root
        here, times = f"{self.hosts.addresses[STUDENT]}:{PORT}", root / "times"
        asked = self.peer(TEACHER, "ask", self.work.job("ask", self.address, options.top_k, 1), "--times", str(times))
        replay = ["--answers", str(self.work.answers), "--address", here]
        kept = self.peer(STUDENT, "replay", self.work.job("replay", here, options.top_k, 1), *replay)
        learned = self.learn(name, options.top_k, options.steps, here)
        until = (root / name / FILE).stat().st_mtime
        for process in (asked, kept):
            process.kill()
        came = [float(line) for line in times.read_text().splitlines()]
        since = until - sum(learned["seconds"])
        within = [at for at in came if since <= at <= until]
        seconds = (within[-1] - within[0]) / (len(within) - 1)
        return {"student": mean(learned), "teacher": seconds * self.work.batch, "rows": len(within)}


def tllm(*words: str) -> list[str]:
    return [sys.executable, "-m", "tllm.cli", *words]


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    if code := process.wait(SECONDS):
        raise SystemExit(f"{log.stem} ended with {code}:\n{log.read_text()[-2000:]}")


def traffic(hosts: Hosts, host: int) -> dict[str, int]:
    """Bytes and packets of a host's interface so far, all headers included."""
    words = ["ip", "-n", hosts.names[host], "-s", "-j", "link", "show", "dev", "eth0"]
    (found,) = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    return {
        f"{way}_{what}": found["stats64"][of][what]
        for way, of in (("received", "rx"), ("sent", "tx"))
        for what in ("bytes", "packets")
    }


def figures(records: list[StepRecord], work: Work, counted: dict[str, int]) -> Figures:
    """What a run says of its steps after those that warm up, and its bytes for each token that it learned."""
    metrics = [one.metrics or {} for one in records]
    tokens = len(records) * work.batch * (work.length - 1)

    def middle(name: str) -> float:
        return statistics.fmean(one[name] for one in metrics) if name in metrics[0] else 0.0

    return {
        "seconds": [one.seconds for one in records[min(work.options.warm, len(records) - 1) :]],
        "bytes": (counted["received_bytes"] + counted["sent_bytes"]) / tokens,
        "packets": (counted["received_packets"] + counted["sent_packets"]) / tokens,
        "told": middle("teacher_bytes_per_token"),
        "lost": middle("teacher_kl"),
        "top_k": middle("teacher_top_k"),
    }


def mean(run: Figures) -> float:
    return statistics.fmean(run["seconds"])


@contextlib.contextmanager
def place(work: Work, delay_ms: float = 0.0) -> Iterator[Place]:
    """Hosts whose packets are those of a wire: no longer than Ethernet's."""
    with Hosts(2, rate=work.options.rate, delay_ms=delay_ms) as hosts:
        for name in hosts.names:
            mtu = ["mtu", "1500"] if delay_ms else []
            words = ["link", "set", "dev", "eth0", *mtu, "gso_max_segs", "1"]
            subprocess.run(["ip", "-n", name, *words], check=True)
        hosts.put_relay_first()
        found = Place(hosts, work)
        found.teach()
        yield found


def rounds(work: Work) -> dict[str, list[Figures]]:
    """Contenders in turn."""
    options = work.options
    found: dict[str, list[Figures]] = {name: [] for name in (APART, TOGETHER, SHORT, DELAYED, WHOLE)}
    for turn in range(options.rounds):
        print(f"round {turn + 1} of {options.rounds}, load {os.getloadavg()[0]:.2f}", flush=True)
        with place(work) as here:
            if not work.answers.exists():
                here.keep()
            found[APART].append(here.apart(f"apart-{turn}"))
            found[TOGETHER].append(here.learn(f"together-{turn}", options.top_k, options.steps))
            found[SHORT].append(here.learn(f"short-{turn}", options.top_k, options.steps, short=True))
            if not turn:
                found[WHOLE].append(here.learn("whole", 0, options.warm + 2))
        with place(work, options.delay) as there:
            found[DELAYED].append(there.learn(f"delayed-{turn}", options.top_k, options.steps))
        for name, runs in found.items():
            print(name, json.dumps(runs[-1]), flush=True)
    return found


class RememberedRows(FrozenModel):
    """Computes each row once."""

    @cached_property
    def rows(self) -> dict[bytes, torch.Tensor | None]:
        return {}

    def __call__(self, row: PackedRow, observe: Observe = unobserved) -> torch.Tensor | None:
        name = row.input_ids.tobytes()
        if name not in self.rows:
            self.rows[name] = super().__call__(row, observe)
        return self.rows[name]


def sent_of_model(title: str, name: str, text: Path | None, top_k: int = COUNTED_TOP_K) -> Figures:
    """How sure a teacher is of some rows, and what it sends of them by each budget: whole messages, without TLS."""
    folder, config, _ = AnsweringModel.find_causal(name, "gives no next token", "")
    part = RememberedRows.load(config, LocalFiles(folder), "float32")
    model = TeacherModel(name, part, vocabulary_digest(folder), folder)
    size = model.spec.vocab_size
    rows = np.random.default_rng(0).integers(3, size, COUNTED_ROWS * COUNTED_LENGTH)
    if text is not None:
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer is not None, f"{name} has no tokenizer"
        ids = tokenizer.encode(text.read_text()[: 16 * COUNTED_ROWS * COUNTED_LENGTH])
        rows = np.array(ids[: COUNTED_ROWS * COUNTED_LENGTH])
    places = packed(np.arange(COUNTED_LENGTH))
    questions = [
        Question(number, packed(row), (COUNTED_LENGTH,), places)
        for number, row in enumerate(rows.reshape(COUNTED_ROWS, COUNTED_LENGTH))
    ]
    all_of = [model.answer(question, Lesson(0, 1.0, size, model.vocabulary)) for question in questions]
    log_p_PV = torch.cat([torch.frombuffer(bytearray(answer.log_probs), dtype=torch.float32) for answer in all_of])
    of_places = entropy(log_p_PV.reshape(-1, size))
    spread = [round(float(of_places.quantile(part)), 3) for part in (0.1, 0.5, 0.9)]
    found: Figures = {
        "title": title,
        "vocabulary": size,
        "entropy": float(of_places.mean()),
        "spread": spread,
        "sent": [],
    }
    for budget, dtype in product(BUDGETS, get_args(LogProbDtype)):
        lesson = Lesson(top_k, 1.0, size, model.vocabulary, budget, log_prob_dtype=dtype)
        answers = [model.answer(question, lesson) for question in questions]
        sent = sum(len(msgspec.msgpack.encode(one)) + frame.HEADER_SIZE for one in (*questions, *answers))
        counts = sum(int(answer.token_counts.sum()) for answer in answers)
        lost = sum(answer.lost for answer in answers)
        each = {"bytes": sent / len(rows), "tokens": counts / len(rows), "lost": lost / len(rows)}
        found["sent"].append({"budget": budget, "dtype": dtype, **each})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", default="30m", choices=tuple(SHAPES))
    parser.add_argument("--teacher", default="60m", choices=tuple(SHAPES))
    parser.add_argument("--rate", default="100mbit", help="of the link (%(default)s)")
    parser.add_argument("--delay", type=float, default=5.0, help="one way, in ms, of the second link (%(default)s)")
    parser.add_argument("--budget", type=float, default=0.1, help="nats a token that may be lost (%(default)s)")
    parser.add_argument("--log-probs", default="uint8", choices=get_args(LogProbDtype), help="(%(default)s)")
    parser.add_argument("--top-k", type=int, default=1024, help="tokens of a place at most (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of a run (%(default)s)")
    parser.add_argument("--warm", type=int, default=3, help="of them not counted (%(default)s)")
    parser.add_argument("--trained", help="a trained model (folder, GGUF file or name), of which bytes are counted")
    parser.add_argument("--text", type=Path, help="what the trained model reads")
    parser.add_argument("--folders", type=Path, default=Path("/tmp/tllm-bench"), help="where model folders are kept")
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    if bool(options.trained) != bool(options.text):
        parser.error("--trained and --text go together")
    folders = made(options.folders)
    student = model_folder(options.student, folders, torch.float32, VOCABULARY)
    teacher = peaked_folder(options.teacher, folders, VOCABULARY)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="distillation-", dir=folders) as root:
        work = Work(student, teacher, Path(root), options)
        runs = rounds(work)
        models = [sent_of_model("made up", str(teacher), None)]
        if options.trained:
            models.append(sent_of_model(Path(options.trained).stem, options.trained, options.text))
    settings = {name: getattr(options, name) for name in ("student", "teacher", "rate", "delay", "budget", "top_k")}
    settings |= {"log_probs": options.log_probs, "rounds": options.rounds, "steps": options.steps, "warm": options.warm}
    settings |= {"length": work.length, "batch": work.batch, "took": time.monotonic() - start}
    raw = {"settings": settings, "runs": runs, "sent": models}
    write(page(raw), raw)


PURPOSE = """Whether teacher and student compute at the same time where 100 Mbit/s lie between them, and what crosses
the wire. `tllm teach` with {teacher} and `tllm train` of a student with {student}, {vocabulary:,} tokens, float32, each
with a thread and a processor for itself in a network namespace of its own, over TLS. {batch} rows of {length} tokens a
step; the teacher sends the likeliest tokens that a budget of {budget:g} nats a token wants, {top_k:,} at most, and the
rest as one number (`kl_budget`); log-probabilities travel as {log_probs} (`log_prob_dtype`)."""
READING = """Medians over rounds in which contenders take turns, the first {warm} of {steps} steps of a run left out.
Alone is measured at the same time on both processors: the student is answered at once by a program that has all
answers, over loopback; the teacher is asked over loopback by a program that does nothing with them. `overlap` is the
longer of the two divided by the step; `hidden` is the share of the shorter that costs no time: (teacher + student -
step) / shorter. With a queue of one the teacher has one row at a time, of the next step alone (tllm's trainer without
its command). Bytes are those of the student's interface in both directions, with all headers of Ethernet, TCP and TLS
(of the delayed link those of IP), of whole runs with their handshakes, for each token that is learned; `tllm` is the
run's own `teacher_bytes_per_token`. `times fewer` is beside the logits of all tokens in two bytes each, headers not
counted; `all logits` is a run with `top_k = 0`, which sends four bytes for each."""
LIMITS = """- Both machines are of one computer: they share its memory, as in the times alone, and each processor also
  sends and receives.
- The weights of the teacher that was timed are random, and made so that it is about as sure as a trained model: the
  second table has both. Its rows are of whole messages, without TLS and TCP.
- One teacher and one student."""


def page(raw: dict[str, Any]) -> Page:
    """The page of the `settings`, the `runs` of each contender and what models `sent`."""
    settings = raw["settings"]
    named = {who: parameters_of(settings[who]) for who in ("teacher", "student")}
    purpose = PURPOSE.format(**settings | named, vocabulary=VOCABULARY)
    body = f"{time_table(raw)}\n\n{sent_table(raw['sent'])}"
    reading = f"{conclusion(raw)}\n\n{READING.format(**settings)}"
    missed = "\n".join(f"- {line}" for line in missed_aims(raw))
    limits = f"{missed}\n{LIMITS}" if missed else LIMITS
    return Page("training", "distillation", "A teacher and its student over 100 Mbit/s", purpose, body, reading, limits)


def parameters_of(size: str) -> str:
    """In words; the sizes' own names are of a smaller vocabulary."""
    shape = SHAPES[size]
    more = 2 * (VOCABULARY - shape["vocab_size"]) * shape["hidden_size"]
    return (
        parameters(size) if not more else f"{parameters(size)} and {more / 1e6:.0f} million for its larger vocabulary"
    )


def of_rounds(raw: dict[str, Any], name: str) -> dict[str, float]:
    """Medians over rounds: a step of a contender, both alone, and how well they overlap."""
    alone = raw["runs"][APART]
    each = []
    for run, apart in zip(raw["runs"][name], alone, strict=False):
        teacher, student, step = apart["teacher"], apart["student"], mean(run)
        longer, shorter = max(teacher, student), min(teacher, student)
        each.append({"step": step, "overlap": longer / step, "hidden": (teacher + student - step) / shorter})
        each[-1] |= {key: run[key] for key in ("bytes", "told", "lost", "top_k")}
    return {key: statistics.median(one[key] for one in each) for key in each[0]}


def named_ways(settings: dict[str, Any]) -> dict[str, str]:
    delayed = f"100 Mbit/s and {settings['delay']:g} ms"
    return {TOGETHER: TOGETHER, DELAYED: delayed, SHORT: f"{TOGETHER}, queue of one", WHOLE: f"{TOGETHER}, all logits"}


def time_table(raw: dict[str, Any]) -> str:
    rows = [["", "s a step", "overlap", "hidden", "bytes a token", "tllm", "times fewer", "nats lost", "tokens sent"]]
    for who in ("teacher", "student"):
        seconds = statistics.median(one[who] for one in raw["runs"][APART])
        rows.append([f"{who} alone", f"{seconds:.3f}", *[""] * 7])
    for name, title in named_ways(raw["settings"]).items():
        found = of_rounds(raw, name)
        cells = [f"{found['step']:.3f}", percent(found["overlap"]), percent(found["hidden"])]
        cells += [f"{found['bytes']:,.0f}", f"{found['told']:,.0f}", f"{LOGITS / found['bytes']:.1f}"]
        budget = name != WHOLE
        rows.append(
            [title, *cells, f"{found['lost']:.4f}" if budget else "", f"{found['top_k']:.0f}" if budget else ""]
        )
    return table(rows)


def sent_table(models: list[Figures]) -> str:
    rows = [
        ["teacher", "entropy (10, 50, 90 % of places)", "budget, dtype", "nats lost", "tokens", "bytes", "times fewer"]
    ]
    for model in models:
        spread = ", ".join(f"{one:.2f}" for one in model["spread"])
        title = f"{model['title']}, {model['vocabulary']:,} tokens"
        for at, found in enumerate(model["sent"]):
            fewer = 2 * model["vocabulary"] / found["bytes"]
            first = [title, f"{model['entropy']:.2f} ({spread})"] if not at else ["", ""]
            cells = [
                f"{found['budget']:g}, {found['dtype']}",
                f"{found['lost']:.4f}",
                f"{found['tokens']:.1f}",
                f"{found['bytes']:,.0f}",
                f"{fewer:.1f}",
            ]
            rows.append([*first, *cells])
    return table(rows)


def conclusion(raw: dict[str, Any]) -> str:
    settings = raw["settings"]
    near, far, short = (of_rounds(raw, name) for name in (TOGETHER, DELAYED, SHORT))
    return (
        f"Over 100 Mbit/s teacher and student overlap by {percent(near['overlap'])} (85 % is the aim), with "
        f"{settings['delay']:g} ms by {percent(far['overlap'])}, with a queue of one by {percent(short['overlap'])}. "
        f"{near['bytes']:,.0f} bytes cross the wire for each token that is learned, {LOGITS / near['bytes']:.1f} times "
        f"fewer than all logits in two bytes (50 is the aim), at {near['lost']:.4f} nats lost of a budget of "
        f"{settings['budget']:g}. tllm itself says {near['told']:,.0f} bytes, "
        f"{percent(near['told'] / near['bytes'] - 1, sign=True)} beside the interface."
    )


def missed_aims(raw: dict[str, Any]) -> list[str]:
    """In words, of the budget that the runs have."""
    settings, found = raw["settings"], []
    for name in (TOGETHER, DELAYED):
        way = of_rounds(raw, name)
        title = named_ways(settings)[name]
        if way["overlap"] < OVERLAP:
            found.append(f"Over {title} the overlap is {percent(way['overlap'])}, and {percent(OVERLAP)} is the aim.")
        if LOGITS / way["bytes"] < FEWER:
            found.append(f"Over {title} bytes are {LOGITS / way['bytes']:.1f} times fewer, and {FEWER} is the aim.")
        if way["lost"] > settings["budget"]:
            found.append(f"Over {title} {way['lost']:.4f} nats are lost, and the budget is {settings['budget']:g}.")
    return found


if __name__ == "__main__":
    main()
