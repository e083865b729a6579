"""Child processes as the tests see them: who they are, where they hang, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
KEPT_BY_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes that the standard library keeps for the life of its parent; no test can be blamed for them."""

SECONDS_FOR_STACKS = 12
"""Of all processes together; whoever prints them is ended soon after that."""

_kept: set[int] = set()
_waited_for: set[int] = set()


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies (Linux), so that none can hide."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def keep(pid: int) -> None:
    """A process that the tests themselves keep until they end: no test has left it behind."""
    _kept.add(pid)


def wait_for(pid: int) -> None:
    """Whoever started this process takes its exit status."""
    _waited_for.add(pid)


def ended_orphans() -> set[int]:
    """Processes that this one has adopted, and that have ended; each takes a place in the system's table until then."""
    return {pid for pid in _children(os.getpid()) if pid not in _waited_for and _state(pid) == "Z"}


def bury(pids: set[int]) -> None:
    """Take the exit status of processes for which nobody else waits."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def descendants(root: int | None = None) -> list[int]:
    """Every living process below `root` (this one when left out), parents before children; no zombies."""
    found: list[int] = []
    todo = _children(root or os.getpid())
    while todo:
        pid = todo.pop(0)
        is_kept = pid in _kept or any(word in command(pid) for word in KEPT_BY_PYTHON)
        if _state(pid) not in ("Z", "X", "") and not is_kept:
            found.append(pid)
        todo += _children(pid)
    return found


def workers_of(root: int | None = None) -> list[int]:
    """The workers that a command has started on its machine, local-0 first; without the server that forks them."""
    forked = [pid for pid in descendants(root) if "tllm.node.fork_server" in command(pid)]
    return sorted(forked[1:])


def command(pid: int) -> str:
    """The command line of a process, or what is known of it when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "(gone)"


def print_stacks(pids: list[int], file: Path) -> None:
    """Ask each process for its threads' stacks, which come on its own stderr or in `file`; say who cannot answer.

    One after the other, so that their stacks do not mix, but not for ever: who is stopped writes none."""
    until = time.monotonic() + SECONDS_FOR_STACKS
    for pid in pids:
        if _catches(pid, signal.SIGUSR1):
            _say(f"--- stacks of child {pid}: {command(pid)}")
            before, deaf = _size(file), _blocking(pid, signal.SIGUSR1)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
            while (_size(file) == before or _blocking(pid, signal.SIGUSR1) - deaf) and time.monotonic() < until:
                time.sleep(0.02)
            if file.exists():
                _say(file.read_bytes()[before:].decode(errors="replace"))
        else:
            _say(f"--- child {pid} has no stack printer on SIGUSR1: {command(pid)}")


def kill(pids: list[int]) -> None:
    """End the processes at once. Who started them takes their exit status."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def wait_until_gone(pids: list[int], seconds: float = 30.0) -> list[int]:
    """Give processes that are ending some time, which is long, as each may be late on a busy machine; those that still
    live."""
    end = time.monotonic() + seconds
    alive = pids
    while alive and time.monotonic() < end:
        time.sleep(0.02)
        alive = [pid for pid in alive if _state(pid) not in ("Z", "X", "")]
    return alive


def _say(text: str) -> None:
    print(text, file=sys.__stderr__, flush=True)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def _state(pid: int) -> str:
    """One letter as in proc(5), or "" for a process that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _catches(pid: int, number: int) -> bool:
    return _has(Path(f"/proc/{pid}/status"), "SigCgt:", number)


def _blocking(pid: int, number: int) -> set[Path]:
    """Threads that this signal does not reach now, as one that is in its handler."""
    with contextlib.suppress(OSError):
        return {thread for thread in Path(f"/proc/{pid}/task").iterdir() if _has(thread / "status", "SigBlk:", number)}
    return set()


def _has(status: Path, field: str, number: int) -> bool:
    """Whether a signal is in one of the sets that a file of proc(5) shows."""
    with contextlib.suppress(OSError):
        for line in status.read_text().splitlines():
            if line.startswith(field):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
