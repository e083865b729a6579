"""A slower processor: with this folder on PYTHONPATH a process computes at `TLLM_SLOWER` (0.25: a quarter) of its own.

For each second of the processor that its threads take, 1 / speed seconds pass, counted in steps of less than a
millisecond: a thread that holds the interpreter's lock lets all others wait. A quota of a control group does not do
for this: after a rest it lets a machine run at full speed, until a tick of the kernel's clock finds its part used up.
As only the processor's seconds count, what runs beside it disturbs no more than it slows these down.
"""

import ctypes
import os
import sys
import threading
import time

STEP = 0.0003
"""Seconds between two looks."""

LEAST = 0.0001
"""Seconds of debt for which it is not worth while to stop."""

SLACK = 29
"""PR_SET_TIMERSLACK: by how many nanoseconds a sleep may be longer."""


def slow_down(speed: float) -> None:
    """For ever; counts from when torch is there, so that it takes no longer to start."""
    while "torch" not in sys.modules or getattr(sys.modules["torch"].__spec__, "_initializing", False):
        time.sleep(0.05)
    libc = ctypes.PyDLL(None)  # unlike time.sleep its usleep keeps the lock
    libc.prctl(SLACK, 1000)
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_FIFO, os.sched_param(1))
    sys.setswitchinterval(STEP)
    used, now, debt = spent(), time.perf_counter(), 0.0
    while True:
        time.sleep(STEP)
        before, begun = used, now
        used, now = spent(), time.perf_counter()
        taken = sum(max(0.0, seconds - before.get(thread, 0.0)) for thread, seconds in used.items())
        debt = max(0.0, debt + taken / speed - (now - begun))
        if debt > LEAST:
            libc.usleep(round(1e6 * debt))


def spent() -> dict[int, float]:
    """Of each thread but this the processor's seconds. The clock of the whole process stands still between ticks."""
    found = {}
    for thread in threading.enumerate():
        if thread.ident not in (None, threading.get_ident()):
            try:
                found[thread.ident] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            except OSError:  # it has just ended
                continue
    return found


if part := os.environ.get("TLLM_SLOWER"):
    threading.Thread(target=slow_down, args=(float(part),), daemon=True, name="slower").start()
