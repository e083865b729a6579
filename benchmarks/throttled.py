"""Machines that this one is cut into: network namespaces over shaped links, each slower than this."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.hosts import Hosts

SLOWER, SLOTS = Path(__file__).parent / "slower", Path(__file__).with_name("slots.py")
SHARES = 262_144  # of the processors, where others have 1,024
REAL_TIME = 450_000
"""Microseconds of each second, for threads that come before the others; a group's are taken for a while after it."""

POLL, END_SECONDS = 0.05, 20.0


@dataclass(frozen=True)
class Shape:
    """Each machine's part of a processor's speed, the rate at which each sends, and how long bytes are on their way."""

    speeds: tuple[float, ...]
    rate: str
    delay_ms: float = 0.0

    def __str__(self) -> str:
        parts = ":".join(f"{speed:g}" for speed in self.speeds)
        return f"speeds {parts}, {self.rate}" + (f", {self.delay_ms:g} ms" if self.delay_ms else "")


class First:
    """A control group whose processes come before all others of this machine, for the length of a block."""

    def __init__(self, name: str) -> None:
        first = Path("/sys/fs/cgroup/cpu")
        self.folder = (first if first.is_dir() else first.parent) / name
        self.folder.mkdir()
        if first.is_dir():
            (self.folder / "cpu.shares").write_text(str(SHARES))
            (self.folder / "cpu.rt_runtime_us").write_text(str(REAL_TIME))
        else:
            (self.folder / "cpu.weight").write_text("10000")

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` inside."""
        return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self.folder), *words]

    def remove(self) -> None:
        until = time.monotonic() + END_SECONDS
        while (self.folder / "cgroup.procs").read_text() and time.monotonic() < until:
            time.sleep(POLL)
        self.folder.rmdir()


class Machines:
    """Used in a `with`, which takes everything down again. Each keeps to one processor, or to a part of one.

    One that has a processor to itself is held back by `slots.py`, from `hold_back` on; those that share one compute in
    virtual time (`slower`).
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.hosts = Hosts(len(shape.speeds), rate=shape.rate, delay_ms=shape.delay_ms)
        self.first = First(f"tllm-{os.getpid()}")
        self.processors = _processors(shape.speeds)
        self.running: list[subprocess.Popen[bytes]] = []
        self.slots: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Machines:
        self.hosts.__enter__()
        if (relay := self.hosts.relay) is not None:  # a cable waits for no processor
            os.sched_setscheduler(relay.pid, os.SCHED_FIFO, os.sched_param(2))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self.hosts.__exit__(kind, error, trace)
        self.first.remove()

    def start(self, machine: int, log: Path, *words: str, asked: bool = False) -> subprocess.Popen[bytes]:
        """A program of Python on a machine, what it says in `log`: of one that is asked, only its errors."""
        keep = ("taskset", "--cpu-list", str(self.processors[machine]))
        command = self.hosts.command(machine, *keep, sys.executable, *words)
        with log.open("wb") as out:
            process = subprocess.Popen(
                self.first.command(*command),  # outside: a namespace shows other files of the system
                stdin=subprocess.PIPE if asked else None,
                stdout=subprocess.PIPE if asked else out,
                stderr=out if asked else subprocess.STDOUT,
                env={**os.environ, **self._slower(machine), "OMP_NUM_THREADS": "1"},
            )
        self.running.append(process)
        return process

    def hold_back(self) -> None:
        """From now on each machine is as slow as it is said to be."""
        for machine, processor in enumerate(self.processors):
            if self._is_alone(machine):
                words = [sys.executable, str(SLOTS), str(processor), str(self.shape.speeds[machine])]
                self.slots.append(subprocess.Popen(words, stdout=subprocess.PIPE))
        for slots in self.slots:
            assert slots.stdout is not None and slots.stdout.readline() == b"ready\n", "a processor is not held back"

    def _is_alone(self, machine: int) -> bool:
        return self.processors.count(self.processors[machine]) == 1

    def _slower(self, machine: int) -> dict[str, str]:
        if self._is_alone(machine):
            return {}
        path = os.pathsep.join(filter(None, (str(SLOWER), os.environ.get("PYTHONPATH"))))
        return {"TLLM_SLOWER": str(self.shape.speeds[machine]), "PYTHONPATH": path}

    def end(self) -> None:
        """End all that was started: by Ctrl-C, and what does not heed it by force."""
        for slots in self.slots:
            slots.kill()
            slots.communicate()
        self.slots.clear()
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


def _processors(speeds: tuple[float, ...]) -> list[int]:
    """Which processor each machine has: the fastest first, each the one that has the most left."""
    here, taken, found = sorted(os.sched_getaffinity(0)), dict[int, float](), [0] * len(speeds)
    for place in sorted(range(len(speeds)), key=lambda place: -speeds[place]):
        found[place] = min(here, key=lambda one: taken.get(one, 0.0))
        taken[found[place]] = taken.get(found[place], 0.0) + speeds[place]
    assert max(taken.values()) < 1, "each machine has what it is said to have"
    return found
