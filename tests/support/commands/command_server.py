"""A process that has imported what the `tllm` command needs, and forks what a test starts of ours as a command.

Importing torch takes seconds of a processor, more than most commands that the tests run. `ForkedCommand` asks for a
fork over a socket whose number is the argument here: a line of JSON (`Start`) with the files that are to be its stdin,
stdout and stderr; the answer is its process number. The fork belongs to the test's process, as what it starts itself
does: its parent here ends at once, and tests adopt orphans (`adopt_orphans`). It ends when the socket is closed.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import socket
import sys

import msgspec

from tests.support.comm.namespaces import enter
from tllm.cli.main import COMMANDS, module_of
from tllm.core.memory import VARIABLE

MORE_MODULES = ("tllm.api.engine_options", "tllm.node.serve.open_cluster", "tllm.node.worker", "tllm.server.run")
LINE_BYTES = 2**20


class Start(msgspec.Struct, frozen=True):
    """A module that is to be run as `python -m` does: its words, where, and with which environment."""

    module: str
    words: list[str]
    environment: dict[str, str]
    folder: str
    namespace: str | None
    is_unbuffered: bool


def serve(control: socket.socket) -> Start | None:
    """Fork commands until the socket is closed. Returns None then, and in every fork what it is to run."""
    while True:
        line, files, _, _ = socket.recv_fds(control, LINE_BYTES, 3)
        if not line:
            return None
        while not line.endswith(b"\n"):
            line += control.recv(LINE_BYTES)
        told, tell = os.pipe()
        if not (between := os.fork()):
            if pid := os.fork():
                os.write(tell, b"%d\n" % pid)
                os._exit(0)
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.closerange(3, max(*files, told, tell, control.fileno()) + 1)
            control.detach()
            return msgspec.json.decode(line, type=Start)
        os.waitpid(between, 0)  # from now on the test's process is the parent
        control.sendall(os.read(told, 32))
        for file in (*files, told, tell):
            os.close(file)


def become(start: Start) -> None:
    """Take on the place and the environment of a command."""
    if start.namespace is not None:
        enter(start.namespace)
    os.chdir(start.folder)
    tunables = os.environ.get(VARIABLE)  # which the C library has read: the command need not be executed again for it
    os.environ.clear()
    os.environ.update(start.environment | ({VARIABLE: tunables} if tunables else {}))
    sys.argv[1:] = start.words
    if start.is_unbuffered:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    for module in (*map(module_of, COMMANDS), *MORE_MODULES):
        importlib.import_module(module)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        start = serve(control)
    if start is not None:
        become(start)
        runpy.run_module(start.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
