"""The processor's name, as its system tells it."""

from __future__ import annotations

import platform
from pathlib import Path

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
