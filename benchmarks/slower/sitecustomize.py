"""A slower processor, in virtual time: with this folder on PYTHONPATH a process computes at `TLLM_SLOWER` (0.25: a
quarter) of its own.

A thread works as fast as it can, and is late by what a slower one would have taken longer before anybody can notice:
before it sends, waits for a message or for another thread, asks how far that is, or looks at its clock. What counts is
the processor's own seconds, so that machines which share one are as slow as they are said to be, and disturb no more
than they work. Whoever waits for a message comes before those that compute: it has a processor as soon as it would have
had its own, and the others are paid for what they wait.
"""

import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

LEAST = 0.0001
"""Seconds for which it is not worth while to sleep yet."""

SLACK = 29
"""PR_SET_TIMERSLACK: by how many nanoseconds a sleep may be longer."""

LINKS = {
    "tllm.comm.links.framed_link": "FramedLink",
    "tllm.comm.links.receive_buffer": "milliseconds",
    "tllm.node.roles.control": "Control",
}
"""What leaves a rank, and what they define last of all that is replaced."""

now, sleep = time.perf_counter, time.sleep  # as they are where nothing is owed


class Thread(threading.local):
    """What a thread has computed and slept."""

    owed = 0.0  # seconds; less than none where it slept too long
    waits = False

    def __init__(self) -> None:
        self.mark()

    def mark(self) -> None:
        """What has passed is paid, or took no longer than it did."""
        self.used, self.seen = time.thread_time(), now()

    def pay(self) -> None:
        """Sleep for what a slower processor would have taken longer; what has passed anyway is a part of it."""
        if self.waits:
            return
        taken, passed = time.thread_time() - self.used, now() - self.seen
        self.owed += max(0.0, taken / SPEED - passed)
        if self.owed > LEAST:
            begun = now()
            sleep(self.owed)
            self.owed -= now() - begun
        self.mark()


def after_paying(function: Callable[..., Any]) -> Callable[..., Any]:
    """It is noticed from outside."""

    @functools.wraps(function)
    def called(*values: Any, **named: Any) -> Any:
        thread.pay()
        return function(*values, **named)

    return called


def waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """What it takes itself is no slower."""

    @functools.wraps(function)
    def called(*values: Any, **named: Any) -> Any:
        thread.pay()
        waits, thread.waits = thread.waits, True
        try:
            return function(*values, **named)
        finally:
            thread.waits = waits
            thread.mark()

    return called


def first(function: Callable[..., Any]) -> Callable[..., Any]:
    """It does not wait for those that compute."""

    @functools.wraps(function)
    def called(*values: Any, **named: Any) -> Any:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        try:
            return function(*values, **named)
        finally:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))

    return called


def replace(owner: Any, by: Callable[[Callable[..., Any]], Callable[..., Any]], *names: str) -> None:
    for name in names:
        setattr(owner, name, by(getattr(owner, name)))


def notice_links() -> None:
    """As soon as they are imported."""
    while any(last not in vars(sys.modules.get(module, threading)) for module, last in LINKS.items()):
        sleep(0.02)
    framed, inbox, control = (sys.modules[module] for module in LINKS)
    replace(framed.FramedLink, after_paying, "send", "start", "send_bytes")
    replace(inbox.Inbox, first, "_await")
    replace(inbox.Inbox, waiting, "_await", "wait")
    replace(inbox, waiting, "push_any")
    replace(control.Control, after_paying, "post")


if part := os.environ.get("TLLM_SLOWER"):
    SPEED = float(part)
    thread = Thread()
    ctypes.CDLL(None).prctl(SLACK, 1000)  # of the threads to come, too
    replace(time, after_paying, "perf_counter", "monotonic")
    replace(ThreadPoolExecutor, after_paying, "submit")
    replace(Future, after_paying, "done")
    replace(time, waiting, "sleep")
    replace(threading.Condition, waiting, "wait")
    threading.Thread(target=notice_links, daemon=True, name="slower").start()
