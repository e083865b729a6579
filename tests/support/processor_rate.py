"""How much slower than a usual processor the one at hand is.

Machines on which everything takes seven times as long were met more than once. A test that takes 8 s elsewhere is no
hang there at 60 s, so that limits of tests are those of a usual processor, times this. And the whole suite, which is to
take 25 minutes, would take two hours: from `SLOW` on it is without the tests that are marked so, and says it.
"""

from __future__ import annotations

import os
import time

VARIABLE = "TLLM_TEST_SLOWNESS"
"""What one process measured holds for those that it starts, which may run beside each other."""

USUAL_SECONDS = 0.003
"""What `_loop` takes of a processor at 3 to 4 GHz, with Python 3.11."""

SLOW = 3.0
"""How many times as slow a processor is from which on tests that are marked slow are left out."""


def slowness() -> float:
    """1 on a usual processor and on a faster one, 8 where everything takes eight times as long."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{max(1.0, min(_loop() for _ in range(5)) / USUAL_SECONDS):.2f}"
    return float(os.environ[VARIABLE])


def _loop() -> float:
    """Seconds of processor, so that other programs on it do not count."""
    start, total = time.process_time(), 0
    for number in range(100_000):
        total += number
    return time.process_time() - start
