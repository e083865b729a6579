"""Memory that this process holds, as the system counts it. No torch.

Huge pages for what is computed in: the C library asks for them only if its environment says so as a process begins.

One page of 2 MiB comes with one fault where 512 of 4 KiB would come one by one, so that memory may go back to the
system and come again (docs/log.md). Nothing is to be done where the system gives them to everybody, or to nobody.

What the C library does with memory that is given back: it keeps it for the next batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
RESET_PEAK = "5"  # Linux, man 5 proc


def rss_bytes() -> int:
    """Memory that this process holds now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def peak_bytes() -> int:
    """Memory that this process has held at the most, since `forget_peak_bytes` if that was called.

    Not `ru_maxrss` where the system says more: a process begins with that of the one that started it (Linux, vfork).
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


def forget_peak_bytes() -> None:
    """Let `peak_bytes` begin anew from what is held now; where the system has no way to, it goes on from the start."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)


POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ON_REQUEST = "[madvise]"
VARIABLE, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def asking(environment: Mapping[str, str], policy: Path = POLICY) -> dict[str, str]:
    """The environment of a process that asks for them. What the user has said of them stays."""
    found = dict(environment)
    given = found.get(VARIABLE, "")
    if TUNABLE not in given and _on_request(policy):
        found[VARIABLE] = ":".join(filter(None, (given, f"{TUNABLE}=1")))
    return found


def begin_anew_asking(policy: Path = POLICY) -> None:
    """This program from its start, in the same process, unless it asks for them or cannot have them."""
    environment = asking(os.environ, policy)
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _on_request(policy: Path) -> bool:
    try:
        return ON_REQUEST in policy.read_text()
    except OSError:
        return False


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEEP = 2**30
LARGEST_SERVED = 32 * 2**20
"""Bytes; glibc takes no more. Longer tensors are mapped, and unmapped when freed."""

LARGEST_TRAINED = 4 * 2**20
"""A step has pieces of all sizes at once: long ones that lie in the heap leave holes there (docs/log.md)."""


def keep_freed_memory(largest: int = LARGEST_SERVED) -> bool:
    """For a process that only runs a model: tensors of up to `largest` bytes. False where the C library has no such
    setting.

    Each layer's activations are a few MiB, which glibc would map and unmap for every operation; prompts of 512 tokens
    go a quarter faster (docs/log.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, largest) and mallopt(M_TRIM_THRESHOLD, KEEP))


def give_back_memory() -> None:
    """What the C library keeps goes back to the system, where it can: what comes next needs other sizes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
