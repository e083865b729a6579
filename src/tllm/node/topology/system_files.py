"""Small files of the system (/proc, /sys), of which any may be missing, and lists of processors as it writes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

SYSTEM = Path("/")


def read_file(path: Path) -> str:
    """The text of a small file of the system; "" where there is none, or where it may not be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(text: str) -> int | None:
    """A whole number of at least 0, None for any other text: the system writes -1 for what it does not know."""
    return int(text) if text.isascii() and text.isdigit() else None


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Processors in ascending order, of a list as the kernel writes it: "0-3,8". ValueError for any other text."""
    found = set[int]()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        start, stop = number(first), number(last if dash else first)
        if start is None or stop is None or stop < start:
            raise ValueError(f"{part!r} in {text!r} is no range of processors")
        found.update(range(start, stop + 1))
    return tuple(sorted(found))


def cpu_list(cpus: Iterable[int]) -> str:
    """Processors as the kernel writes them: "0-3,8"."""
    runs = list[list[int]]()
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
