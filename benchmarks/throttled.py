"""Machines that this one is cut into: network namespaces over shaped links, each with a part of the processors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.hosts import Hosts

PERIOD = 0.02
"""Seconds of which a machine gets its part: short, so that one step sees many."""

POLL, END_SECONDS = 0.05, 20.0


@dataclass(frozen=True)
class Shape:
    """Processors of each machine, the rate at which each sends, and how long bytes are on their way."""

    quotas: tuple[float, ...]
    rate: str
    delay_ms: float = 0.0

    def __str__(self) -> str:
        parts = ":".join(f"{quota:g}" for quota in self.quotas)
        return f"{parts} processors, {self.rate}" + (f", {self.delay_ms:g} ms" if self.delay_ms else "")


class Quota:
    """A control group of the processor, of cgroup 1 or 2, for the length of a block."""

    def __init__(self, name: str, processors: float) -> None:
        first = Path("/sys/fs/cgroup/cpu")
        self.folder = (first if first.is_dir() else first.parent) / name
        self.folder.mkdir()
        quota, period = round(1e6 * PERIOD * processors), round(1e6 * PERIOD)
        if first.is_dir():
            (self.folder / "cpu.cfs_period_us").write_text(str(period))
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self.folder / "cpu.max").write_text(f"{quota} {period}")

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` inside."""
        return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self.folder), *words]

    def remove(self) -> None:
        until = time.monotonic() + END_SECONDS
        while (self.folder / "cgroup.procs").read_text() and time.monotonic() < until:
            time.sleep(POLL)
        self.folder.rmdir()


class Machines:
    """Used in a `with`, which takes everything down again."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.hosts = Hosts(len(shape.quotas), rate=shape.rate, delay_ms=shape.delay_ms)
        self.quotas: list[Quota] = []
        self.running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Machines:
        self.hosts.__enter__()
        for place, processors in enumerate(self.shape.quotas):
            self.quotas.append(Quota(f"tllm-{os.getpid()}-{place}", processors))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self.hosts.__exit__(kind, error, trace)
        for quota in self.quotas:
            quota.remove()

    def start(self, machine: int, log: Path, *words: str, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        """A `tllm` command on a machine, its output in `log`."""
        command = self.hosts.command(machine, sys.executable, "-m", "tllm.cli", *words)
        with log.open("wb") as out:
            process = subprocess.Popen(
                self.quotas[machine].command(*command),  # outside: a namespace shows other files of the system
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                cwd=cwd,
            )
        self.running.append(process)
        return process

    def ask(self, machine: int, *words: str) -> str:
        """What a program says on a machine, outside its part of the processors."""
        done = subprocess.run(self.hosts.command(machine, *words), capture_output=True, text=True, check=True)
        return done.stdout

    def end(self) -> None:
        """End all that was started: by Ctrl-C, and what does not heed it by force."""
        for process in self.running:
            if process.poll() is None:
                process.send_signal(2)
        for process in self.running:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()


def said(log: Path, pattern: str, process: subprocess.Popen[bytes], seconds: float = 120.0) -> re.Match[str]:
    """Wait until a command has said something. RuntimeError with what it said if it ends, or takes too long."""
    until = time.monotonic() + seconds
    while True:
        ended = process.poll() is not None
        if found := re.search(pattern, log.read_text(errors="replace")):
            return found
        if ended or time.monotonic() > until:
            raise RuntimeError(f"{log.name} did not say {pattern}: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(POLL)
