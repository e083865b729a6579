"""A process that has imported what the `tllm` command needs, and forks what a test starts of ours as a command.

Importing torch takes seconds of a processor, more than most commands that the tests run. `ForkedCommand` asks for a
fork over a socket whose number is the argument here: a line of JSON (`Start`) with the files that are to be its stdin,
stdout and stderr; the answer is its process number. The fork belongs to the test's process, as what it starts itself
does: its parent here ends at once, and tests adopt orphans (`adopt_orphans`). It ends when the socket is closed.

A command that starts workers has a fork server of its own, which imports as much again. So each fork begins with a
spare beside it: a child of its own that waits to become that server (`ForkedServer`), and ends with it. The
demonstration, which has one cluster after another, begins with three.

Each rank that trains measures for 0.3 s what its device can do at best, and all ranks of a machine at once. Those that
are forked here do so in a moment, as in `runs.train`.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import subprocess
import sys

from tests.support.commands.forked_command import ForkedServer, Spares
from tests.support.commands.start import Start, hear
from tllm.cli.main import COMMANDS, module_of

OURS = ("tllm.api.engine_options", "tllm.node.serve.open_cluster", "tllm.node.worker", "tllm.server.run")
OF_CLIENTS = ("openai",)
SPARES_OF_DEMO = 3
PEAK_SECONDS = 0.01


def serve(control: socket.socket) -> Start | None:
    """Fork commands until the socket is closed. Returns None then, and in every fork what it is to run."""
    while (heard := hear(control)) is not None:
        start, files = heard
        told, tell = os.pipe()
        if not (between := os.fork()):
            if pid := os.fork():
                os.write(tell, b"%d\n" % pid)
                os._exit(0)
            control.detach()
            start.become(files)
            return start
        os.waitpid(between, 0)  # from now on the test's process is the parent
        control.sendall(os.read(told, 32))
        for file in (*files, told, tell):
            os.close(file)
    return None


def leave_spares(count: int) -> Start | None:
    """Fork processes that wait until this one starts fork servers. Returns None here, and there what it is to run."""
    spares = Spares()
    ForkedServer.forks = spares
    subprocess.Popen = ForkedServer  # type: ignore[misc]
    for _ in range(count):
        control, theirs = socket.socketpair()
        if not (pid := os.fork()):
            return become_spare(spares, control, theirs)
        theirs.close()
        spares.add(pid, control)
    return None


def become_spare(others: Spares, control: socket.socket, theirs: socket.socket) -> Start:
    """Wait until the command starts a fork server, and become it; or end with the command."""
    others.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    control.close()
    if (heard := hear(theirs)) is None:
        os._exit(0)
    start, files = heard
    start.lead_session()
    theirs.sendall(b"\n")
    theirs.detach()
    start.become(files)
    return start


def main() -> None:
    for module in (*map(module_of, COMMANDS), *OURS, *OF_CLIENTS):
        importlib.import_module(module)
    importlib.import_module("tllm.training.trainer").PEAK_SECONDS = PEAK_SECONDS  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        start = serve(control)
    if start is not None:
        count = SPARES_OF_DEMO if start.words[:1] == ["demo"] else 1
        (leave_spares(count) or start).run()


if __name__ == "__main__":
    main()
