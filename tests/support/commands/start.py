"""`Start`: what a fork is to become, as it is sent with its open files over a socket, and how the fork becomes it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from tests.support.comm.namespaces import enter
from tllm.core.program import PREPARED, VARIABLE, WAITING

LINE_BYTES = 2**20
MOST_FILES = 16
UNUSED_NUMBER = 200
"""No command is passed a file with a number from here on."""

THREADS = "OMP_NUM_THREADS"
"""The variable of the environment that says with how many threads torch computes, which it reads once."""

ARGUMENTS_BEGIN, ARGUMENTS_END = 45, 46
"""Where proc(5)'s stat tells them, counted from the process's state."""


class Start(msgspec.Struct, frozen=True):
    """A module that is to be run as `python -m` does, or the text of a program as `python -c` does: its words, where,
    with which environment, and the numbers of the files that come with it."""

    module: str
    program: str
    words: list[str]
    environment: dict[str, str]
    folder: str
    namespace: str | None
    is_unbuffered: bool
    has_own_session: bool
    files: list[int]
    group: int = 0
    """The group of processes that it is to be in, of those of this session; 0 for that of its starter."""

    def send(self, control: socket.socket, files: Sequence[int]) -> None:
        socket.send_fds(control, [msgspec.json.encode(self) + b"\n"], files)

    def become(self, files: Sequence[int]) -> None:
        """Take on the files, which are open here under these numbers, the place and the environment of a command."""
        _call(files, self.files)
        self.lead_session()
        if self.group:
            os.setpgid(0, self.group)
        if self.namespace is not None:
            enter(self.namespace)
        os.chdir(self.folder)
        # What libraries have read by now: no need to execute the command again for it.
        read = {name: os.environ[name] for name in (VARIABLE, *WAITING, *PREPARED) if name in os.environ}
        os.environ.clear()
        os.environ.update(self.environment | read)
        if THREADS in self.environment:
            sys.modules["torch"].set_num_threads(int(self.environment[THREADS]))
        sys.argv[1:] = self.words
        _show(["python", *(["-m", self.module] if self.module else ["-c"]), *self.words])
        if self.is_unbuffered:
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def lead_session(self) -> None:
        if self.has_own_session and os.getsid(0) != os.getpid():
            os.setsid()

    def run(self) -> None:
        """Run it in this process, to its end."""
        if self.module:
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
            return
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
            file.write(self.program)
            file.flush()
            runpy.run_path(file.name, run_name="__main__")


def hear(control: socket.socket) -> tuple[Start, list[int]] | None:
    """What is sent next, and under which numbers its files are open here; None when the socket is closed."""
    line, files, _, _ = socket.recv_fds(control, LINE_BYTES, MOST_FILES)
    if not line:
        return None
    while not line.endswith(b"\n"):
        line += control.recv(LINE_BYTES)
    return msgspec.json.decode(line, type=Start), files


def _call(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give these files these numbers, and close all others."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, UNUSED_NUMBER) for file in files]
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
    for file in sorted({*range(3, max(moved) + 1)} - {*numbers}):
        with suppress(OSError):
            os.close(file)


def _show(words: Sequence[str]) -> None:
    """Let the system show these words as this process's command line, or as many as there is room for."""
    told = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(told[ARGUMENTS_BEGIN]), int(told[ARGUMENTS_END])
    line = "\0".join(words).encode()[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)
