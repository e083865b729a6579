"""A fault at a moment of a training run over hosts, and what is wrong with the run that goes on after it."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from tests.support.cluster.faulty_cluster import LOOK_SECONDS, Fault
from tests.support.cluster.history import History
from tests.support.cluster.hosts import Hosts
from tests.support.cluster.processes import descendants, wait_until_gone, workers_of
from tests.support.serving.serving_faults import Outcome
from tests.support.training.runs import final, records, train
from tests.support.training.small_job import write_job
from tests.support.training.training_step import furthest
from tllm.training.job.job_file import read_job
from tllm.training.report.metrics import FILE, read_records

TRAINING_MOMENTS = ("training step", "checkpoint")
PLAN, NODES = "pp=3", 3
STEPS, FEW_STEPS, SAVE_EVERY = 80, 12, 6
BOUND, SLOW_BOUND = 60.0, 240.0
LOSS_OFF, WEIGHT_OFF = 1e-12, 1e-11
"""How far float64 may be off under another plan, relative to the size."""


@dataclass(frozen=True)
class Truth:
    """A job, and what undisturbed runs of it come to, by the number of their steps."""

    job: Path
    losses: Mapping[int, list[float]]
    weights: Mapping[int, dict[str, Tensor]]


def undisturbed(folder: Path) -> Truth:
    """Losses and weights of runs on one rank."""
    folder.mkdir()
    config = dict(num_hidden_layers=4, initializer_range=0.02)  # as `train` begins a model
    file = write_job(folder, config, save_steps=SAVE_EVERY, dtype="float64", microbatch_size=2)
    losses, weights = {}, {}
    for steps in (STEPS, FEW_STEPS):
        alone = folder / f"alone-{steps}"
        job = replace(read_job(file).job, output_dir=str(alone), max_steps=steps, save_steps=1000)
        losses[steps] = [record.loss for record in records(train(job, "pp=1"))]
        weights[steps] = final(alone)
    return Truth(file, losses, weights)


class TrainRun:
    """One run of the job over three hosts, of which one is struck; `seed` says which and when."""

    def __init__(self, hosts: Hosts, folder: Path, truth: Truth, fault: Fault, moment: str, seed: int) -> None:
        self.hosts, self.folder, self.truth = hosts, folder, truth
        self.fault, self.moment, self.seed = fault, moment, seed
        self.dice = random.Random(f"{fault.name} {moment} {seed}")
        self.node = self.dice.choice(fault.victims(NODES))
        self.steps = FEW_STEPS if fault.is_slow else STEPS
        self.bound = SLOW_BOUND if fault.is_slow else BOUND
        self.history = History()
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._run = folder / "run"
        self._over = threading.Event()

    def __call__(self) -> Outcome:
        more = ["--set", f"output_dir={self._run}", "--set", f"max_steps={self.steps}"]
        words = ["train", str(self.truth.job), "--nodes", str(NODES), "--plan", PLAN, "--threads", "1", *more]
        self.command = self._start(0, "train", *words, "--cluster-host", self.hosts.addresses[0])
        follower = threading.Thread(target=self._follow, name="operator", daemon=True)
        follower.start()
        try:
            self._join_all()
            self._await_moment()
            self._strike()
            wrong = self._wait()
        finally:
            self._over.set()
            follower.join()
            self._end()
        return self._outcome(wrong)

    def pid(self, node: str) -> int:
        if node in self.nodes:
            return self.nodes[node].pid
        return workers_of(self.command.pid)[0]

    def join(self, host: int) -> None:
        """A node that was killed is not started again: the run goes on with those that are left."""

    def log(self) -> str:
        return (self.folder / "train.log").read_text(errors="replace")

    def _start(self, host: int, name: str, *words: str) -> subprocess.Popen[bytes]:
        return self.hosts.start(host, sys.executable, "-m", "tllm.cli", *words, log=self.folder / f"{name}.log")

    def _join_all(self) -> None:
        while not (line := re.search(r"tllm join (\S+) --token (\S+)", self.log())):
            self._check_lives()
            time.sleep(LOOK_SECONDS)
        for host in range(1, NODES):
            words = ["join", line[1], "--token", line[2], "--name", f"host-{host}", "--threads", "1"]
            self.nodes[f"host-{host}"] = self._start(host, f"host-{host}", *words)

    def _await_moment(self) -> None:
        wanted = self.dice.randint(2, self.steps // 2)
        if self.moment == "checkpoint":
            wanted = SAVE_EVERY
        while self._step() < wanted or (self.moment == "checkpoint" and not any(self._run.glob("step-*"))):
            self._check_lives()
            time.sleep(0.001)

    def _strike(self) -> None:
        saving = sorted(path.name for path in self._run.glob("step-*"))
        self.fault.begin(self, self.node, self.dice)  # type: ignore[arg-type]
        facts = dict(name=self.fault.name, moment=self.moment, node=self.node, seed=self.seed)
        self.history.add("fault", step=self._step(), folders=saving, **facts)

    def _step(self) -> int:
        file = self._run / FILE
        with suppress(FileNotFoundError):
            return file.read_bytes().count(b"\n")
        return 0

    def _wait(self) -> list[str]:
        try:
            code = self.command.wait(self.bound)
        except subprocess.TimeoutExpired:
            os.kill(self.command.pid, signal.SIGUSR1)  # its threads' stacks go to its log
            time.sleep(0.5)
            return [f"the run hangs: no end within {self.bound:g} s"]
        time.sleep(5 * LOOK_SECONDS)  # until the last lines are read
        if code:
            return [f"the run ended with {code}: {self.log()[-300:]}"]
        wrong = self._number_faults()
        innocent = {event["node"] for event in self.history.of("lost")} - (set() if self.fault.is_slow else {self.node})
        wrong += [f"{node} was taken for lost" for node in sorted(innocent)]
        living = [name for name in self.nodes if name != self.node or self.fault.is_slow]
        for name in living:
            with suppress(subprocess.TimeoutExpired):
                self.nodes[name].wait(60)
            if self.nodes[name].returncode != 0:
                wrong.append(f"{name} ended with {self.nodes[name].returncode}")
        return wrong

    def _number_faults(self) -> list[str]:
        """What the run learned, held against the undisturbed one."""
        found, want = read_records(self._run / FILE), self.truth.losses[self.steps]
        if [one.step for one in found] != list(range(1, self.steps + 1)):
            return [f"its steps are {[one.step for one in found]}"]
        off = max(abs(one.loss - loss) / loss for one, loss in zip(found, want, strict=True))
        far, name = furthest(final(self._run), self.truth.weights[self.steps])
        wrong = [f"a loss is off by {off:.1e} of itself"] if off > LOSS_OFF else []
        return wrong + ([f"{name} is off by {far:.1e} of itself"] if far > WEIGHT_OFF else [])

    def _end(self) -> None:
        here = descendants(self.command.pid)
        self.fault.end(self, self.node)  # type: ignore[arg-type]
        for process in (self.command, *self.nodes.values()):
            process.kill()
            process.wait()
        assert wait_until_gone(here) == [], "the command left a process behind"

    def _check_lives(self) -> None:
        assert self.command.poll() is None, f"it ended before the fault: {self.log()}"

    def _follow(self) -> None:
        """The operator's eyes: the command's log and the run's steps as they come."""
        seen, step = 0, 0
        while not self._over.is_set():
            text = self.log()
            *lines, _ = text[seen:].split("\n")
            seen += sum(len(line) + 1 for line in lines)
            for line in lines:
                self._read(line)
            if (now := self._step()) > step:
                step = now
                self.history.add("step", step=step)
            time.sleep(LOOK_SECONDS)

    def _read(self, line: str) -> None:
        if found := re.search(r"lost (\S+): (.*)", line):
            self.history.add("lost", node=found[1], why=found[2])
        elif found := re.search(r"node (\S+) .*has been silent", line):
            self.history.add("late", node=found[1])
        elif found := re.search(r"goes on.* after step (\d+)(.*)", line):
            self.history.add("resumed", step=int(found[1]), how=found[2])

    def _outcome(self, wrong: list[str]) -> Outcome:
        faults = self.history.of("fault")
        at = faults[0].at if faults else 0.0

        def seconds(what: str, after: float = at, **facts: str) -> float | None:
            found = self.history.of(what, after, **facts)
            return round(found[0].at - at, 3) if found else None

        lost, late = seconds("lost", node=self.node), seconds("late", node=self.node)
        since = at + (lost or 0.0)
        return Outcome(
            fault=self.fault.name,
            moment=self.moment,
            seed=self.seed,
            node=self.node,
            tokens=faults[0]["step"] if faults else 0,
            named=min((one for one in (lost, late) if one is not None), default=None),
            lost=lost,
            recovered=seconds("step", since),
            ended=round(self.history.events[-1].at - at, 3),
            wrong=tuple(wrong),
            history=self.history,
        )
