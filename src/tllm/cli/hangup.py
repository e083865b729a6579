"""What becomes of a command whose terminal is closed, or whose connection to another machine breaks off."""

from __future__ import annotations

import os
import signal
from types import FrameType

STANDARD = (0, 1, 2)


def end_on_hangup() -> None:
    """Take SIGHUP for SIGTERM from now on, which a command answers in order: a run saves, a server lets its requests
    end. What it writes to the terminal afterwards goes nowhere. Where SIGHUP is ignored (`nohup`), it stays so."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        return
    terminals = [descriptor for descriptor in STANDARD if os.isatty(descriptor)]

    def answer(number: int, frame: FrameType | None) -> None:
        for descriptor in terminals:
            if not os.isatty(descriptor):  # any more: each write to it would fail
                os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGHUP, answer)
