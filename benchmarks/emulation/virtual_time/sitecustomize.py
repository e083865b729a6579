"""Emulates a slower processor in virtual time. Python imports this file at start-up when its folder is on PYTHONPATH.

`TLLM_EMULATED_SPEED` is the emulated speed (0.25: a quarter of this processor). A thread computes at full speed. Before
anything outside could notice, it sleeps for as long as the slower processor would have computed on: before it sends,
waits for a message or another thread, asks whether another thread is done, or reads the clock. Only the thread's own
CPU seconds count, so several emulated machines can share a processor. A thread that waits for a message has real-time
priority: it runs as soon as the message is there, as it would on a processor of its own, and the computing threads that
it interrupts lose no emulated time.
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

SHORTEST_SLEEP = 0.0001
"""Seconds; what a thread owes is added up until it is more than this."""

PR_SET_TIMERSLACK = 29
"""The option of prctl that says by how many nanoseconds a sleep may be longer."""

now, sleep = time.perf_counter, time.sleep  # the originals, which this file itself uses


class Thread(threading.local):
    """What a thread owes to the emulated processor."""

    owed = 0.0  # seconds to sleep; negative where a sleep was too long
    waits = False

    def __init__(self) -> None:
        self.mark()

    def mark(self) -> None:
        """Count CPU time and real time from now on."""
        self.used, self.seen = time.thread_time(), now()

    def pay(self) -> None:
        """Sleep for what the slower processor would have taken longer, less the real time that has passed anyway."""
        if self.waits:
            return
        taken, passed = time.thread_time() - self.used, now() - self.seen
        self.owed += max(0.0, taken / SPEED - passed)
        if self.owed > SHORTEST_SLEEP:
            begun = now()
            sleep(self.owed)
            self.owed -= now() - begun
        self.mark()


def after_paying(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, before which the thread pays: its effect is seen outside."""

    @functools.wraps(function)
    def called(*values: Any, **named: Any) -> Any:
        thread.pay()
        return function(*values, **named)

    return called


def waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which only waits: the thread pays before it, and its own time is not slowed."""

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


def at_real_time_priority(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which does not wait for threads that compute."""

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


REPLACED = (
    ("tllm.comm.links.framed_link", "FramedLink", after_paying, ("send", "start_send", "send_bytes")),
    ("tllm.comm.links.tcp_link", "ReceiveBuffer", at_real_time_priority, ("_await",)),
    ("tllm.comm.links.tcp_link", "ReceiveBuffer", waiting, ("_await", "wait")),
    ("tllm.comm.links.tcp_link", "", waiting, ("push_any",)),
    ("tllm.node.roles.control", "Control", after_paying, ("post",)),
)
"""What sends or waits in `tllm`: the module, its class or none, how the functions are replaced, and their names."""


def replace_link_functions() -> None:
    """Wait until all modules of `REPLACED` are imported, then replace their functions. A wrong name ends it all."""
    modules = {module for module, *_ in REPLACED}
    while not all(is_imported(module) for module in modules):
        sleep(0.02)
    try:
        for module, owner, by, names in REPLACED:
            replace(getattr(sys.modules[module], owner) if owner else sys.modules[module], by, *names)
    except AttributeError as error:
        print(f"virtual time: {error}", file=sys.stderr, flush=True)
        os._exit(70)


def is_imported(module: str) -> bool:
    """Whether all of a module has been executed."""
    found = sys.modules.get(module)
    return found is not None and not getattr(found.__spec__, "_initializing", False)


if part := os.environ.get("TLLM_EMULATED_SPEED"):
    SPEED = float(part)
    thread = Thread()
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000)  # holds for threads that start later, too
    replace(time, after_paying, "perf_counter", "monotonic")
    replace(ThreadPoolExecutor, after_paying, "submit")
    replace(Future, after_paying, "done")
    replace(time, waiting, "sleep")
    replace(threading.Condition, waiting, "wait")
    threading.Thread(target=replace_link_functions, daemon=True, name="virtual-time").start()
