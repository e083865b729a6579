"""The fork server: a process that has imported what a worker needs, and forks one whenever its starter asks.

Importing torch takes seconds of a processor and some 150 MB. The workers of one machine share both, and one that takes
the place of another is there at once. `WorkerForks` starts the server and speaks with it over the socket whose number
is the argument: it sends a byte with the two files that are to be a worker's stdin and stderr, and is told
`PID started`, later `PID CODE` with the exit code or the negative number of the signal. The server ends when the socket
is closed; its workers go on, as each ends with its own stdin.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys

from tllm.core.stacks import show_stacks_on_signal
from tllm.node import worker


def serve(control: socket.socket) -> bool:
    """Fork workers until the socket is closed. Returns False then, and True in every worker."""
    ended, child_ended = os.pipe()
    for end in (ended, child_ended):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(child_ended)
    ready = select.poll()
    for file in (control.fileno(), ended):
        ready.register(file, select.POLLIN)
    while True:
        asked = {file for file, _ in ready.poll()}
        if ended in asked:
            os.read(ended, 4096)
            _tell_of_ended(control)
        if control.fileno() not in asked:
            continue
        asks, files, _, _ = socket.recv_fds(control, 1, 2)
        if not asks:
            return False
        if not (pid := os.fork()):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become_worker(files, (ended, child_ended))
            return True
        _lead_group(pid)
        for file in files:
            os.close(file)
        _tell(control, f"{pid} started")


def _become_worker(files: list[int], of_server: tuple[int, int]) -> None:
    _lead_group(0)
    for number, file in zip((sys.stdin.fileno(), sys.stderr.fileno()), files, strict=True):
        os.dup2(file, number)
    for file in (*files, *of_server):
        os.close(file)


def _lead_group(pid: int) -> None:
    """A worker leads a group, with which it can be killed. Both processes see to it, as either may be first."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
        os.setpgid(pid, pid)


def _tell_of_ended(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):  # there is no worker left
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            _tell(control, f"{pid} {os.waitstatus_to_exitcode(status)}")


def _tell(control: socket.socket, line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # whoever asked has ended, which the next poll shows
        control.sendall(line.encode() + b"\n")


def main() -> int:
    show_stacks_on_signal()
    gc.collect()
    gc.freeze()  # so that the collections of workers do not write to pages that all of them share
    with socket.socket(fileno=int(sys.argv[1])) as control:
        is_worker = serve(control)
    return worker.main() if is_worker else 0


if __name__ == "__main__":
    sys.exit(main())
