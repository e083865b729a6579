"""Stack traces on a signal, to see where a process hangs: at SIGUSR1 it prints each thread's stack, and goes on."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal

STACKS_VARIABLE = "TLLM_STACKS"
"""Environment variable with a file that the stacks are appended to, for those who do not see this process's stderr."""

_STDERR = 2


def show_stacks_on_signal() -> None:
    """From now on `kill -USR1` shows the stacks on stderr, or in the file that TLLM_STACKS names."""
    name = os.environ.get(STACKS_VARIABLE)
    faulthandler.register(signal.SIGUSR1, file=_opened(name, os.getpid()) if name else _STDERR, all_threads=True)


@functools.cache
def _opened(name: str, process: int) -> int:
    """A file to append to, opened once in a process, however many commands it runs; a fork opens its own."""
    return os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
