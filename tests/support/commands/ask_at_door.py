"""A command as a shell starts it, which a fork of the command server computes in its place; it ends as that does.

`python -I -S ask_at_door.py DOOR MODULE WORD…`; for a program in a file, FILE stands in place of MODULE. This loads
little, since it is what each command of a page costs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

HOST = "TLLM_TEST_HOST"
"""The variable of the environment that names the host on which a shell runs, if not on this machine's."""

EXECUTE = b"execute"
"""The answer to a command that the server cannot fork, since it imported in another environment."""


def main() -> int:
    door, name, *words = sys.argv[1:]
    is_file = name.endswith(".py")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fork is in this group and has it too
    start = {
        "module": "" if is_file else name,
        "program": Path(name).read_text("utf-8") if is_file else "",
        "words": words,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "namespace": os.environ.get(HOST),
        "is_unbuffered": False,
        "has_own_session": False,
        "files": [0, 1, 2],
        "group": os.getpgrp(),
    }
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(door)
        socket.send_fds(control, [json.dumps(start).encode() + b"\n"], [0, 1, 2])
        answer = control.recv(32)
    if answer == EXECUTE:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, *([] if is_file else ["-m"]), name, *words])
    code = int(answer)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no other way
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
