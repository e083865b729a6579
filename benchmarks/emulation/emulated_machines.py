"""Slower machines emulated on this one: network namespaces joined by shaped links, each with a part of a processor."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.processes.python_module import environment
from tests.support.cluster.hosts import Hosts

VIRTUAL_TIME, THROTTLE = Path(__file__).parent / "virtual_time", Path(__file__).with_name("processor_throttle.py")
CPU_SHARES = 262_144  # of a control group; others have 1,024
REAL_TIME = 450_000
"""Microseconds of each second that real-time threads of the group may run. The kernel frees them a while after it."""

POLL, END_SECONDS = 0.05, 20.0


@dataclass(frozen=True)
class ClusterShape:
    """The part of a processor that each machine has, the rate at which it sends, and the delay of links one way."""

    speeds: tuple[float, ...]
    rate: str
    delay_ms: float = 0.0

    def __str__(self) -> str:
        parts = ":".join(f"{speed:g}" for speed in self.speeds)
        return f"speeds {parts}, {self.rate}" + (f", {self.delay_ms:g} ms" if self.delay_ms else "")


class PriorityGroup:
    """A control group whose processes come before all others of this computer. `remove` it when they have ended."""

    def __init__(self, name: str) -> None:
        version_1 = Path("/sys/fs/cgroup/cpu")
        self.folder = (version_1 if version_1.is_dir() else version_1.parent) / name
        self.folder.mkdir()
        if version_1.is_dir():
            (self.folder / "cpu.shares").write_text(str(CPU_SHARES))
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


class EmulatedMachines:
    """Used in a `with`, which takes everything down again. Each machine keeps to one processor, or to a part of one.

    `processor_throttle.py` slows a machine that has a processor to itself, from `throttle` on. Machines that share a
    processor compute in virtual time (`virtual_time/sitecustomize.py`).
    """

    def __init__(self, shape: ClusterShape) -> None:
        self.shape = shape
        self.hosts = Hosts(len(shape.speeds), rate=shape.rate, delay_ms=shape.delay_ms)
        self.group = PriorityGroup(f"tllm-{os.getpid()}")
        self.processors = _processors(shape.speeds)
        self.running: list[subprocess.Popen[bytes]] = []
        self.throttles: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> EmulatedMachines:
        self.hosts.__enter__()
        self.hosts.put_relay_first()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self.hosts.__exit__(kind, error, trace)
        self.group.remove()

    def start(self, machine: int, log: Path, *words: str, asked: bool = False) -> subprocess.Popen[bytes]:
        """Start a Python program on a machine; its output goes to `log`.

        `asked`: its input and output are pipes, and only its errors go to `log`.
        """
        keep = ("taskset", "--cpu-list", str(self.processors[machine]))
        command = self.hosts.command(machine, *keep, sys.executable, *words)
        with log.open("wb") as out:
            process = subprocess.Popen(
                self.group.command(*command),  # joined outside of the namespace, which has its own /sys
                stdin=subprocess.PIPE if asked else None,
                stdout=subprocess.PIPE if asked else out,
                stderr=out if asked else subprocess.STDOUT,
                env=environment(OMP_NUM_THREADS="1", **self._virtual_time(machine)),
            )
        self.running.append(process)
        return process

    def throttle(self) -> None:
        """From now on each machine that has a processor to itself has only its part of it."""
        for machine, processor in enumerate(self.processors):
            if self._is_alone(machine):
                words = [sys.executable, str(THROTTLE), str(processor), str(self.shape.speeds[machine])]
                self.throttles.append(subprocess.Popen(words, stdout=subprocess.PIPE))
        for one in self.throttles:
            assert one.stdout is not None and one.stdout.readline() == b"ready\n", "a processor is not throttled"

    def _is_alone(self, machine: int) -> bool:
        return self.processors.count(self.processors[machine]) == 1

    def _virtual_time(self, machine: int) -> dict[str, str]:
        """The variables with which Python imports `virtual_time/sitecustomize.py` when it starts."""
        if self._is_alone(machine):
            return {}
        return {"TLLM_EMULATED_SPEED": str(self.shape.speeds[machine]), "PYTHONPATH": str(VIRTUAL_TIME)}

    def end(self) -> None:
        """End every process: by SIGINT first, and by SIGKILL what is still there after `END_SECONDS`."""
        for one in self.throttles:
            one.kill()
            one.communicate()
        self.throttles.clear()
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
    """The processor of each machine: the fastest machine chooses first, each takes the one that has the most left."""
    here, taken, found = sorted(os.sched_getaffinity(0)), dict[int, float](), [0] * len(speeds)
    for place in sorted(range(len(speeds)), key=lambda place: -speeds[place]):
        found[place] = min(here, key=lambda one: taken.get(one, 0.0))
        taken[found[place]] = taken.get(found[place], 0.0) + speeds[place]
    assert max(taken.values()) < 1, "the machines of a processor have less than the whole of it"
    return found
