"""A part of a processor: `python benchmarks/slots.py PROCESSOR SPEED` leaves others SPEED of it (0.25: a quarter).

Some two thousand times a second it comes before all others and computes nothing. What it leaves and what it takes are
measured each time, so that the part is right however late it wakes up; and it makes no difference whether what is held
back computes, sends or sleeps, as with a slower processor. No turn is as long as the one before: ranks that sum some
thousand times a second would keep step with turns of one length, and be fast or slow by chance for as long as they do.

No quota of a control group does this: after a rest it lets a machine run at full speed, until a tick of the kernel's
clock finds its part used up.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time

PERIOD = 0.0005
"""Seconds, on an average, in each of which others have their part."""

UNLIKE = 0.3, 1.7
"""The shortest and the longest, of `PERIOD`."""


def hold_back(processor: int, speed: float) -> None:
    """For ever."""
    os.sched_setaffinity(0, {processor})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()
    print("ready", flush=True)
    now = time.perf_counter()
    while True:
        begun = now
        # The others' part. Linux adds no slack to a real-time thread's sleep.
        time.sleep(PERIOD * speed * random.uniform(*UNLIKE))
        now = time.perf_counter()
        until = now + (now - begun) * (1 - speed) / speed
        while now < until:
            now = time.perf_counter()


if __name__ == "__main__":
    hold_back(int(sys.argv[1]), float(sys.argv[2]))
