"""Leaves other programs only a part of a processor: `python processor_throttle.py PROCESSOR SPEED` (0.25: a quarter).

About two thousand times a second it takes the processor before all other programs and computes nothing. It measures
each time how long the others ran and takes as much as the ratio asks for, so the part is right however late it wakes
up. Whether the throttled program computes, sends or sleeps makes no difference, as on a slower processor. The turns
differ in length at random: ranks that sum some thousand times a second would otherwise keep step with them, and be fast
or slow by chance for as long as they do.

A quota of a control group (cgroup) does not do this: after a rest it lets a program run at full speed until the next
tick of the kernel's clock finds its quota used up.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time

PERIOD = 0.0005
"""Mean seconds of a turn: the part of the others and the part that is taken from them."""

TURN_LENGTHS = 0.3, 1.7
"""The shortest and the longest turn, as multiples of `PERIOD`."""


def throttle(processor: int, speed: float) -> None:
    """Runs until it is killed. Prints "ready" when it begins."""
    os.sched_setaffinity(0, {processor})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()
    print("ready", flush=True)
    now = time.perf_counter()
    while True:
        begun = now
        # The part of the others. Linux adds no slack to the sleep of a real-time thread.
        time.sleep(PERIOD * speed * random.uniform(*TURN_LENGTHS))
        now = time.perf_counter()
        until = now + (now - begun) * (1 - speed) / speed
        while now < until:
            now = time.perf_counter()


if __name__ == "__main__":
    throttle(int(sys.argv[1]), float(sys.argv[2]))
