"""Nodes that join a training run as a user lets them, in processes that a test kills; what they say is in files."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster.processes import descendants, wait_until_gone
from tests.support.commands.forked_command import ForkedCommand


@dataclass(frozen=True)
class JoinedNode:
    """One of them by its name, and the file that has its stdout and stderr."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def joined(
    folder: Path, address: str, token: str, name: str, *more: str, cwd: Path | None = None
) -> Iterator[JoinedNode]:
    """A node, killed at the end if it still lives. It runs in `cwd`."""
    log, cache = folder / f"{name}.log", str(folder / f"{name}-weights")
    words = ["join", address, "--token", token, "--name", name, "--threads", "1", "--weights-cache", cache, *more]
    with log.open("wb") as file:
        start = [sys.executable, "-u", "-m", "tllm.cli", *words]
        with ForkedCommand(start, stdout=file, stderr=subprocess.STDOUT, cwd=cwd) as process:
            try:
                yield JoinedNode(name, process, log)
            finally:
                process.kill()


def who_says(nodes: Sequence[JoinedNode], pattern: str, seconds: float = 150.0) -> tuple[JoinedNode, re.Match[str]]:
    """The first of these nodes that says a line, and the line. AssertionError with all that was said if none does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for node in nodes:
            if found := re.search(pattern, node.said(), re.MULTILINE):
                return node, found
        time.sleep(0.02)
    raise AssertionError("\n".join(f"--- {node.name}\n{node.said()}" for node in nodes))


def kill(*processes: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Kill these, and see that none leaves a process behind."""
    below = [pid for process in processes for pid in descendants(process.pid)]
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    assert wait_until_gone(below) == []
