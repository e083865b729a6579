"""The memory of this process: how much it holds, and what the C library keeps of freed memory; bytes as people read
them. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
RESET_PEAK = "5"  # Linux, man 5 proc

GROUPS = "sys/fs/cgroup"
GROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Of control groups, version 2 and version 1: what a group may use, and what it uses."""


def amount(count: float) -> str:
    """Bytes with a binary unit and three digits or so: 12.3 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.{dict(B=0, GiB=2).get(unit, 1)}f} {unit}"


def rss_bytes() -> int:
    """Bytes of memory that this process holds now (resident set size); 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def peak_bytes() -> int:
    """The most bytes that this process has held, since `reset_peak_bytes` if that was called.

    Not `ru_maxrss` where /proc has it: under Linux a process starts with the `ru_maxrss` of the one that started it.
    """
    with contextlib.suppress(OSError):
        if peak := _table(Path("/proc/self/status")).get("VmHWM"):
            return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


def private_bytes(system: Path = Path("/")) -> tuple[int, int]:
    """Bytes of private memory that this process may write to, which is what RLIMIT_DATA limits, and how many of these
    it has touched; 0 and 0 where the system does not say."""
    try:
        table = _table(system / "proc/self/status")
    except OSError:
        return 0, 0
    private = table.get("VmData", 0)
    return private, min(private, table.get("RssAnon", private))


def total_bytes(system: Path = Path("/")) -> int:
    """Bytes of memory that this machine has, or those that its control group allows, where that is less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(whole, group_memory(system)[0] or whole)


def group_memory(system: Path = Path("/")) -> tuple[int | None, int]:
    """Bytes of memory that the control groups around this process let it have, None for all, and how many of these are
    taken, by it or by others in these groups. Cached files take none, as they give way to whoever needs memory."""
    limits, left = list[int](), list[int]()
    for folder in group_folders("memory", system):
        for limit, used in GROUP_FILES:
            with contextlib.suppress(OSError, ValueError):  # where there is no such file, or it says "max"
                allowed, taken = (int((folder / name).read_text()) for name in (limit, used))
                limits.append(allowed)
                left.append(allowed - max(0, taken - _cached(folder)))
    return (min(limits), min(limits) - min(left)) if limits else (None, 0)


def group_folders(kind: str, system: Path = Path("/")) -> Iterator[Path]:
    """Where the control groups that this process is in are described, for a `kind` of resource ("memory"): its own and
    those around it, to the root, which is a container's own; first those of version 2, then those of version 1."""
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    named = {words[1]: words[2] for line in lines if len(words := line.split(":", 2)) == 3}
    alone = next((path for kinds, path in named.items() if kind in kinds.split(",")), "")
    for top, path in ((system / GROUPS, named.get("", "")), (system / GROUPS / kind, alone)):
        folder = top / path.lstrip("/")
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


def _cached(group: Path) -> int:
    """Bytes of files that a control group has in memory, with those of the groups in it."""
    try:
        table = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return sum(int(table.get(f"total_{name}", table.get(name, 0))) for name in ("inactive_file", "active_file"))


def free_bytes(system: Path = Path("/")) -> int:
    """Bytes that this process may still take: what the machine has left, its control group allows, and the process's
    own limit; 0 where the system does not say. `system` is where its files are read."""
    try:
        table, own = (_table(system / "proc" / name) for name in ("meminfo", "self/status"))
    except OSError:
        return 0
    left = [table.get("MemAvailable", 0)]
    if (allowed := resource.getrlimit(resource.RLIMIT_DATA)[0]) != resource.RLIM_INFINITY:
        left.append(allowed - own.get("VmData", 0))
    limit, used = group_memory(system)
    if limit is not None:
        left.append(limit - used)
    return max(0, min(left))


def _table(file: Path) -> dict[str, int]:
    """The lines of a file of Linux that give a number of kB, in bytes."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}


def reset_peak_bytes() -> None:
    """Let `peak_bytes` count from now on; where the system has no way to, it goes on counting from the start."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEEP = 2**30
LARGEST_SERVED = 32 * 2**20
"""Bytes; glibc takes no more. Longer tensors are mapped, and unmapped when freed."""

LARGEST_TRAINED = 4 * 2**20
"""A step has pieces of all sizes at once: long ones that lie in the heap leave holes there (docs/log/memory.md)."""


def keep_freed_memory(largest: int = LARGEST_SERVED) -> bool:
    """Let the C library keep freed memory of tensors of up to `largest` bytes for the next ones.

    Otherwise glibc maps and unmaps a few MiB for every operation on a layer's activations; with it prompts of 512
    tokens take a quarter less time (docs/log/memory.md). False where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, largest) and mallopt(M_TRIM_THRESHOLD, KEEP))


def give_back_memory() -> None:
    """Return what the C library keeps to the system, where it can: what comes next needs other sizes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
