"""Ctrl-Z for a command that has more than its own process: what belongs to it stops with it, and goes on with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Follow = Callable[[signal.Signals], object]
"""follow(SIGSTOP before this process stops, SIGCONT after it goes on)"""

_following: list[Follow] = []


def suspend_in_order() -> None:
    """Answer SIGTSTP from now on by stopping all that follows, then this process. Where the signal is ignored it stays
    so. Signals are the first thread's alone, which calls this."""
    if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, _suspend)


@contextmanager
def following_suspension(follow: Follow) -> Iterator[None]:
    """In the block `follow` is called before this process is suspended, and after it goes on."""
    _following.append(follow)
    try:
        yield
    finally:
        _following.remove(follow)


def _suspend(number: int, frame: FrameType | None) -> None:
    following = tuple(_following)
    for follow in following:
        follow(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    for follow in reversed(following):
        follow(signal.SIGCONT)
