"""A slower processor, in virtual time: with this folder on PYTHONPATH a process computes at `TLLM_SLOWER` (0.25: a
quarter) of its own.

A thread computes as fast as it can, and is late by what a slower one would have taken longer before anybody can notice:
before it sends, receives, waits for another thread or asks how far that is, or looks at its clock. What counts is the
processor's own seconds, so that machines which share one are as slow as they are said to be, and disturb no more than
they work. A thread that sends or receives comes before those that compute: it has a processor as soon as it would have
had its own, and whoever computes meanwhile is paid for.

What links do to send and receive takes no longer than it does here.
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

LINK = "send", "recv", "start", "send_bytes", "recv_bytes", "wait"

now, sleep = time.perf_counter, time.sleep


class Thread(threading.local):
    """What a thread has computed and slept."""

    owed = 0.0  # seconds; less than none where it slept too long

    def __init__(self) -> None:
        self.mark()

    def mark(self) -> None:
        """What has passed is paid, or took no longer than it did."""
        self.used, self.seen = time.thread_time(), now()

    def pay(self) -> None:
        """Sleep for what a slower processor would have taken longer; what has passed anyway is a part of it."""
        taken, passed = time.thread_time() - self.used, now() - self.seen
        self.owed += max(0.0, taken / SPEED - passed)
        if self.owed > LEAST:
            begun = now()
            sleep(self.owed)
            self.owed -= now() - begun
        self.mark()


def noticed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Paid before; what it takes itself is no slower."""

    @functools.wraps(function)
    def paid(*values: Any, **named: Any) -> Any:
        thread.pay()
        try:
            return function(*values, **named)
        finally:
            thread.mark()

    return paid


def first(function: Callable[..., Any]) -> Callable[..., Any]:
    """It does not wait until others have computed."""

    @functools.wraps(function)
    def called(*values: Any, **named: Any) -> Any:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        try:
            return function(*values, **named)
        finally:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))

    return called


def notice(owner: Any, *names: str) -> None:
    for name in names:
        setattr(owner, name, noticed(getattr(owner, name)))


def notice_links() -> None:
    """As soon as they are imported."""
    while any(name not in sys.modules for name in ("tllm.comm.framed", "tllm.node.control")):
        sleep(0.02)
    while "FramedLink" not in vars(sys.modules["tllm.comm.framed"]):
        sleep(0.001)
    link = sys.modules["tllm.comm.framed"].FramedLink
    for name in LINK:
        setattr(link, name, first(getattr(link, name)))
    notice(link, *LINK)
    while "Control" not in vars(sys.modules["tllm.node.control"]):
        sleep(0.001)
    notice(sys.modules["tllm.node.control"].Control, "post")


if part := os.environ.get("TLLM_SLOWER"):
    SPEED = float(part)
    thread = Thread()
    ctypes.CDLL(None).prctl(SLACK, 1000)  # of the threads to come, too
    notice(time, "perf_counter", "sleep")
    notice(threading.Condition, "wait")
    notice(ThreadPoolExecutor, "submit")
    notice(Future, "done")
    threading.Thread(target=notice_links, daemon=True, name="slower").start()
