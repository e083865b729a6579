"""Memory that this process holds, as the system counts it. No torch."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
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
