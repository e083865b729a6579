"""Child processes that run a module of `benchmarks`: their command line and environment, and what they take."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tllm.recipes.bench.processes import free_row

ROOT = Path(__file__).resolve().parents[2]


def module_command(module: str, *words: str) -> list[str]:
    """The command line of `python -m benchmarks.<module>`; run it with `environment()`."""
    return [sys.executable, "-m", f"benchmarks.{module}", *words]


def environment(**more: str) -> dict[str, str]:
    """This process's environment with the repository on PYTHONPATH, so that a child finds `benchmarks`."""
    path = os.pathsep.join(filter(None, (more.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH"), str(ROOT))))
    return {**os.environ, **more, "PYTHONPATH": path}


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now, and that no outgoing connection is given meanwhile."""
    return free_row(1)


def descendants(pid: int) -> list[int]:
    """A process and all that it started, itself first."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in descendants(int(child)))]


def peak_mib(pid: int) -> float:
    """The most memory that a process has held, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
