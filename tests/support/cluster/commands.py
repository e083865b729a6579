"""The `tllm` command as a user runs it: to its end, or in the background."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from tests.support.commands.forked_command import ForkedCommand

EXACT = ("--dtype", "float32")
"""For replies of `models/tiny` that are compared over faults. In bfloat16 its two likeliest tokens are one rounding
apart here and there, and on some processors how a product rounds depends on what is computed beside it."""


def tllm(
    *words: str, host: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with these variables beside our own; `host` are words that run it on another host."""
    return run_module("tllm.cli", *words, host=host, env=env)


def run_module(
    name: str, *words: str, host: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As `tllm`, for any module of ours."""
    command, pipe = [*host, sys.executable, "-m", name, *words], subprocess.PIPE
    with ForkedCommand(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **(env or {})}) as process:
        said, errors = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, said, errors)


def but_for_late(said: str) -> str:
    """What a command said on stderr, without that a node was late, as any is on a machine that is busy enough."""
    return "".join(line for line in said.splitlines(keepends=True) if "has been silent for" not in line)


class Running:
    """A command in the background. `before` are statements that its process executes first."""

    def __init__(
        self, *words: str, host: Sequence[str] = (), env: Mapping[str, str] | None = None, before: str = ""
    ) -> None:
        program = f"{before}\nimport runpy\nrunpy.run_module('tllm.cli', run_name='__main__', alter_sys=True)\n"
        start = ["-c", program] if before else ["-m", "tllm.cli"]
        self.process = ForkedCommand(
            [*host, sys.executable, *start, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.lines: list[str] = []
        self.logged: list[str] = []

    def until(self, pattern: str) -> re.Match[str]:
        """Wait for a line of its output; AssertionError with what it said if it ends before."""
        assert self.process.stdout is not None and self.process.stderr is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError("".join([*self.lines, self.process.stderr.read()]))

    def until_logged(self, words: str) -> None:
        """Wait for a line on its stderr; AssertionError with what it said if it ends before."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.logged.append(line)
            if words in line:
                return
        raise AssertionError("".join([*self.lines, *self.logged]))

    def interrupt(self) -> tuple[int, str]:
        """Ctrl-C; the exit code and what it said on stderr."""
        self.process.send_signal(signal.SIGINT)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """The exit code and what it said on stderr."""
        if self.logged:  # some of stderr may be read already, which `communicate` does not know
            assert self.process.stderr is not None
            self.logged += self.process.stderr
        _, errors = self.process.communicate()
        return self.process.returncode, "".join(self.logged) + errors


@contextlib.contextmanager
def running(
    *words: str, host: Sequence[str] = (), env: Mapping[str, str] | None = None, before: str = ""
) -> Iterator[Running]:
    """A command in the background, killed at the end if it still runs; `host` are words that run it on another host,
    `env` variables beside our own, `before` statements that its process executes first."""
    command = Running(*words, host=host, env=env, before=before)
    with command.process:
        try:
            yield command
        finally:
            command.process.kill()
