"""Ctrl-Z: what stops with a command, and goes on with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tllm.node.machine import suspension

COMMAND = """
import signal, sys
from tllm.node.machine.suspension import following_suspension, suspend_in_order

suspend_in_order()
with (
    following_suspension(lambda number: print("bar", number.name, flush=True)),
    following_suspension(lambda number: print("workers", number.name, flush=True)),
):
    print("ready", flush=True)
    sys.stdin.readline()
print("over", flush=True)
sys.stdin.readline()
"""


def test_what_follows_a_command_stops_before_it_and_goes_on_after_it() -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with command:
        assert command.stdin is not None and command.stdout is not None
        assert command.stdout.readline() == "ready\n"
        suspend(command)
        assert [command.stdout.readline() for _ in range(4)] == [
            "bar SIGSTOP\n",
            "workers SIGSTOP\n",
            "workers SIGCONT\n",
            "bar SIGCONT\n",
        ]
        command.stdin.write("\n")
        command.stdin.flush()
        assert command.stdout.readline() == "over\n"
        suspend(command)
        command.communicate("\n")
    assert command.returncode == 0


def suspend(command: subprocess.Popen[str]) -> None:
    """Ctrl-Z, and once the command has stopped `fg`."""
    command.send_signal(signal.SIGTSTP)
    _, status = os.waitpid(command.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    command.send_signal(signal.SIGCONT)


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        suspension.suspend_in_order()
        assert signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTSTP, before)
