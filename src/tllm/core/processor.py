"""The processor's name, as its system tells it, and how many processors this process may use."""

from __future__ import annotations

import contextlib
import os
import platform
from functools import cache
from pathlib import Path

from tllm.core.memory import group_folders

CPUINFO = Path("/proc/cpuinfo")
NAMES = ("model name", "Model")
"""What /proc/cpuinfo calls it, of x86 and of ARM."""


def processor_name(cpuinfo: Path = CPUINFO) -> str:
    """The name of the first processor; that of its family where the system says no more."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    found: dict[str, str] = {}
    for name, _, value in (line.partition(":") for line in lines):
        found.setdefault(name.strip(), value.strip())
    named = (found.get(name) for name in NAMES)
    return next(filter(None, named), "") or platform.processor() or platform.machine()


@cache
def processors() -> int:
    """Those that this process may run on: those that it could use when it was first asked, before it was bound."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(system: Path = Path("/")) -> float | None:
    """Of how many processors the control groups around this process let it have the time; None for all."""
    return min(filter(None, map(_allowed, group_folders("cpu", system))), default=None)


def group_threads(system: Path = Path("/")) -> int | None:
    """Threads that always go on under a quota of fewer processors than there are, as containers have it; None where
    there is none.

    A part of a processor counts for nothing: each time that the quota is used up the system stops one thread, and all
    that meet it wait.
    """
    allowed = quota(system)
    return None if allowed is None or allowed >= processors() else max(1, int(allowed))


def _allowed(group: Path) -> float | None:
    """Processors of which one control group, of version 2 or 1, allows the time; None for all."""
    period, allowed = "", ""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError):
            allowed, _, period = " ".join((group / name).read_text().strip() for name in names).partition(" ")
            break
    return int(allowed) / int(period) if allowed.isdigit() and period.isdigit() else None
