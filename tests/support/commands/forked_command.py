"""`ForkedCommand`: a `subprocess.Popen` whose process is forked by the command server, which saves its imports."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from tests.support.cluster.processes import keep
from tests.support.commands import command_server
from tests.support.commands.command_server import Start
from tllm.core.memory import huge_page_environment

OURS = ("tllm.", "tests.", "benchmarks.")

READ_AT_IMPORT = ("ATEN_", "GLIBC_", "GOMP_", "KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH_")
"""Beginnings of the names of variables that are read while modules are imported, or before."""


class ForkedCommand(subprocess.Popen[Any]):
    """As Popen. What is no `python -m` with a module of ours, or has an environment that the server's imports were not
    made in, is executed as ever; `ip netns exec HOST` and `env -C FOLDER` may stand before it."""

    def _execute_child(self, args: Any, *settings: Any) -> None:
        cwd, environment = settings[4:6]
        pipes = settings[9:15]  # the child's and our end of stdin, ours and its of stdout, and of stderr
        start = start_of([args] if isinstance(args, str) else args, cwd, environment)
        if start is None:
            super()._execute_child(args, *settings)  # type: ignore[misc]
            return
        theirs = [pipes[0], pipes[3], pipes[5]]
        self.pid = _server().fork(start, theirs)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def start_of(words: Sequence[str], folder: str | os.PathLike[str] | None, given: dict[str, str] | None) -> Start | None:
    """What the server is to run for a command line; None if it cannot."""
    words, namespace, environment = list(words), None, dict(os.environ if given is None else given)
    folder = os.fspath(folder or os.getcwd())
    if words[:3] == ["ip", "netns", "exec"]:
        namespace, words = words[3], words[4:]
    if words[:2] == ["env", "-C"]:
        folder, words = words[2], words[3:]
    if is_unbuffered := words[1:2] == ["-u"]:
        del words[1]
    if words[:2] != [sys.executable, "-m"] or not words[2].startswith(OURS):
        return None
    if _read_at_import(environment) != _server().environment:
        return None
    return Start(words[2], words[3:], environment, folder, namespace, is_unbuffered)


class _Server:
    """The server's process, which ends with this one."""

    def __init__(self) -> None:
        self.environment = _read_at_import(os.environ)
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", command_server.__name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=huge_page_environment(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=[theirs.fileno()],
            )
        keep(self._process.pid)
        atexit.register(self.close)

    def fork(self, start: Start, files: Sequence[int]) -> int:
        """The process number of a command that has been started with these as its stdin, stdout and stderr."""
        own = [number if file == -1 else file for number, file in enumerate(files)]
        socket.send_fds(self._control, [msgspec.json.encode(start) + b"\n"], own)
        return int(self._control.recv(32))

    def close(self) -> None:
        self._control.close()
        self._process.wait()


@cache
def _server() -> _Server:
    return _Server()


def _read_at_import(environment: Any) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}
