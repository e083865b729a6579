"""Ctrl-C for a caller that is known to wait: one that came earlier would interrupt the test itself."""

from __future__ import annotations

import signal
import sys
import time
from concurrent.futures import Future

SECONDS_TO_WAIT = 20


def interrupt_when_it_waits(thread: int, received_by: int | None = None) -> None:
    """Send SIGINT once a thread waits for what a call in another thread comes to. Called from another thread.

    The thread that waits receives it, or another one of the process, which does not end the wait.
    """
    until = time.monotonic() + SECONDS_TO_WAIT
    while not _waits_for_a_future(thread):
        assert time.monotonic() < until, f"the caller has waited for no future within {SECONDS_TO_WAIT} s"
        time.sleep(0.001)
    signal.pthread_kill(received_by or thread, signal.SIGINT)


def _waits_for_a_future(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not Future.result.__code__:
        frame = frame.f_back
    return frame is not None
