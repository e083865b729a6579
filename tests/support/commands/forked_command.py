"""`ForkedCommand`: a `subprocess.Popen` whose process is forked by the command server, which saves its imports."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import tllm
from tests.support.cluster.processes import adopt_orphans, keep, wait_for
from tests.support.commands.start import THREADS, Start
from tllm.core.program import computing_environment

OURS = ("tllm.", "tests.", "benchmarks.")
SOURCE = str(Path(tllm.__file__).parents[1])

READ_AT_IMPORT = (
    "ATEN_",
    "GLIBC_",
    "GOMP_",
    "KMP_",
    "LD_",
    "LRU_CACHE_",
    "MKL_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTHON",
    "TORCH_",
)
"""Beginnings of the names of variables that are read while modules are imported, or before."""


class Forks(Protocol):
    """Who forks, and those variables of the environment that its imports were made in."""

    environment: dict[str, str]

    def fork(self, start: Start, files: Sequence[int]) -> int | None:
        """The process number of what was started with these as its stdin, stdout, stderr and what is passed on; None if
        it forks no more."""


class ForkedCommand(subprocess.Popen[Any]):
    """As Popen. What is neither `python -c` nor `python -m` with a module of ours, or has an environment that the
    server's imports were not made in, is executed as ever; `ip netns exec HOST` and `env -C FOLDER` may stand before
    it."""

    modules: ClassVar[tuple[str, ...]] = OURS
    """Beginnings of the names of those that are forked."""

    takes_programs: ClassVar[bool] = True
    """Whether `python -c` is forked."""

    forks: ClassVar[Forks | None] = None
    """Who forks; None for the command server."""

    def _execute_child(self, args: Any, *settings: Any) -> None:
        pipes = settings[9:15]  # the child's and our end of stdin, ours and its of stdout, and of stderr
        start = None if isinstance(args, (str, bytes, os.PathLike)) else self._start_of([*args], *settings)
        theirs = [number if file == -1 else file for number, file in enumerate((pipes[0], pipes[3], pipes[5]))]
        pid = None if start is None else self._fork(start, [*theirs, *start.files[3:]])
        if pid is None:
            super()._execute_child(args, *settings)  # type: ignore[misc]
            wait_for(self.pid)
            return
        wait_for(pid)
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _start_of(self, words: list[str], *settings: Any) -> Start | None:
        """What is to be forked for a command line; None if it cannot."""
        passed, folder, given = settings[3:6]
        namespace, environment = None, dict(os.environ if given is None else given)
        folder = os.fspath(folder or os.getcwd())
        if words[:3] == ["ip", "netns", "exec"]:
            namespace, words = words[3], words[4:]
        if words[:2] == ["env", "-C"]:
            folder, words = words[2], words[3:]
        if is_unbuffered := words[1:2] == ["-u"]:
            del words[1]
        is_program = words[:2] == [sys.executable, "-c"] and self.takes_programs
        if not is_program and (words[:2] != [sys.executable, "-m"] or not words[2].startswith(self.modules)):
            return None
        if read_at_import(environment) != (self.forks or command_server()).environment:
            return None
        return Start(
            module="" if is_program else words[2],
            program=words[2] if is_program else "",
            words=words[3:],
            environment=environment,
            folder=folder,
            namespace=namespace,
            is_unbuffered=is_unbuffered,
            has_own_session=bool(settings[20]),
            files=[0, 1, 2, *passed],
        )

    def _fork(self, start: Start, files: Sequence[int]) -> int | None:
        return (self.forks or command_server()).fork(start, files)


class ForkedServer(ForkedCommand):
    """As Popen, but for a fork server of workers. It stands in Popen's place where the program starts one by itself."""

    modules = ("tllm.node.fork_server",)
    takes_programs = False


class Spares:
    """Processes that a command has beside it from its beginning, and that become the first fork servers it starts."""

    def __init__(self) -> None:
        self.environment = read_at_import(os.environ)
        self._waiting: list[tuple[int, socket.socket]] = []

    def add(self, pid: int, control: socket.socket) -> None:
        self._waiting.append((pid, control))

    def fork(self, start: Start, files: Sequence[int]) -> int | None:
        if not self._waiting:
            return None
        pid, control = self._waiting.pop(0)
        with control:
            start.send(control, files)
            control.recv(1)  # a process that Popen has started leads its session already
        return pid

    def close(self) -> None:
        """Forget them, in a process that is one itself."""
        for _, control in self._waiting:
            control.close()
        self._waiting.clear()


class _Server:
    """The server's process, which ends with this one."""

    def __init__(self) -> None:
        adopt_orphans()  # whoever asks for a fork is the parent of what is forked, and can wait for its end
        began_with = environment_at_start()
        self.environment = read_at_import(began_with)
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.commands.command_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=computing_environment(began_with) | {"PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=[theirs.fileno()],
            )
        self._one_at_a_time = threading.Lock()
        keep(self._process.pid)
        atexit.register(self.close)

    def fork(self, start: Start, files: Sequence[int]) -> int:
        with self._one_at_a_time:
            start.send(self._control, files)
            return int(self._control.recv(32))

    def close(self) -> None:
        self._control.close()
        self._process.wait()


@cache
def environment_at_start() -> dict[str, str]:
    """This process's environment when it was first asked for, which `conftest.py` does before any test: what a test has
    set by the time that the server is started is not what the server imports in."""
    return dict(os.environ)


@cache
def command_server() -> _Server:
    """The one server of this process, which is started when it is first asked for."""
    return _Server()


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are read at import; without where our own modules are, the variables of
    `computing_environment`, which the command server has and the program gives to the processes that it starts, and
    torch's number of threads, which a fork sets (`Start.become`)."""
    read = {
        name: value for name, value in computing_environment(environment).items() if name.startswith(READ_AT_IMPORT)
    }
    if THREADS in read:
        read[THREADS] = "any"
    path = [one for one in read.pop("PYTHONPATH", "").split(os.pathsep) if one not in ("", SOURCE)]
    return read | ({"PYTHONPATH": os.pathsep.join(path)} if path else {})
