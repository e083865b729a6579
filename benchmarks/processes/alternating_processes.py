"""Processes that take turns: each contender waits in processes of its own until it is told to take some steps.

This way all contenders meet the same noise of the machine, and one that waits takes no time from another. A contender's
own side is `Turns`.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes.python_module import environment

Report = dict[str, Any]


class Contender:
    """The driver's side: one or more processes that step together."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]], errors: Sequence[Path]) -> None:
        self._processes, self._errors = processes, errors

    def ready(self) -> None:
        """Return when every process waits for its first turn."""
        for number in range(len(self._processes)):
            self._read(number)

    def take(self, steps: int) -> Report:
        """Take a turn. `seconds` are those of the slowest process, `losses` the mean; the rest is of rank 0."""
        reports = self.ask(str(steps))
        losses = [statistics.fmean(step) for step in zip(*(report["losses"] for report in reports), strict=True)]
        return {**reports[0], "losses": losses, "seconds": max(report["seconds"] for report in reports)}

    def ask(self, line: str) -> list[Report]:
        """Write a line to every process; what each reports then."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return [self._read(number) for number in range(len(self._processes))]

    def _read(self, number: int) -> Report:
        out = self._processes[number].stdout
        assert out is not None
        for line in out:
            if line.startswith("{"):
                return dict(json.loads(line))
        code, said = self._processes[number].wait(), self._errors[number].read_text()[-2000:]
        raise SystemExit(f"process {number} of a contender has ended with {code}:\n{said}")


def alternate(takes: Mapping[str, Callable[[int], Report]], rounds: int) -> dict[str, list[Report]]:
    """The reports of every contender's turns, each asked for by the number of the round: that of round 0, which warms
    up, and those of so many more. Rounds alternate the order."""
    reports: dict[str, list[Report]] = {name: [] for name in takes}
    for turn in range(rounds + 1):
        for name in list(takes)[:: -1 if turn % 2 else 1]:
            reports[name].append(takes[name](turn))
        print(f"round {turn} of {rounds}", flush=True)
    return reports


@contextlib.contextmanager
def contender(commands: Sequence[Sequence[str]], logs: Path, threads: int, **env: str) -> Iterator[Contender]:
    """Start the processes of a contender; they end with the block. Their errors go to one file each in `logs`."""
    logs.mkdir(parents=True, exist_ok=True)
    errors = [logs / f"{os.getpid()}-{id(commands)}-{number}.log" for number in range(len(commands))]
    with contextlib.ExitStack() as stack:
        processes = []
        for words, path in zip(commands, errors, strict=True):
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(path.open("wb")),
                text=True,
                env=environment(OMP_NUM_THREADS=str(threads), **env),
            )
            stack.callback(_end, process)
            processes.append(process)
        yield Contender(processes, errors)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
