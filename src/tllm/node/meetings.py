"""How long a small sum takes between two ranks that compute in between: each comes when its work is done, and wakes up.

In a loop that does nothing else a message is there within some tens of microseconds. After work that went through
memory it takes several times that: caches are cold, and neither rank comes when the other does. What of a turn is the
work's, the way's, and lost, `planner.sums` tells.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec
import torch

from tllm.comm.group import Group
from tllm.ground.timing import mean_seconds

WIDTH, ROWS = 1024, 2048
"""Of the matrix that is read in between: 8 MiB, about the half of a layer of a model with a billion parameters."""

SHORT_BYTES = 4 * WIDTH
"""Of a short sum."""

ALONE = 0.4
"""Of the time, for the work alone."""

ROUNDS = 3
"""Of the work alone and of turns, one after the other: what slows a machine down for a while then slows both."""

MANY = 1 << 18
"""Numbers of a long sum: 1 MiB."""


class Met(msgspec.Struct, frozen=True, tag=True):
    """Mean seconds of this rank's `work` alone, and of a `turn`: the work and a short sum. Of a long sum `rate`,
    bytes/s, and `effort`, seconds of this process's processor to send a byte and to take one."""

    work: float
    turn: float
    rate: float
    effort: float


def measure_sums(group: Group, seconds: float) -> Met:
    """Both ranks of a group call this. They sum numbers for about so many seconds, short sums in half of it."""
    work, turn = _short(group, seconds / 2)
    slowest = torch.tensor([work], dtype=torch.float64)
    short = max(0.0, turn - float(group.all_reduce(slowest, "max")))
    spent = time.process_time()
    each, count = _sums(group, torch.ones(MANY), seconds / 2, lambda: None)
    effort = (time.process_time() - spent) / (count * MANY * 4)
    return Met(work, turn, MANY * 4 / max(each - short, 1e-9), effort)


def _short(group: Group, seconds: float) -> tuple[float, float]:
    """(this rank's work alone, a turn of work and a sum)."""
    weight, x = torch.full((ROWS, WIDTH), 0.01), torch.ones(WIDTH)

    def work() -> None:
        torch.mv(weight, x)

    alone, turns = [], []
    for _ in range(ROUNDS):
        alone.append(mean_seconds(work, ALONE * seconds / ROUNDS))
        group.all_reduce(torch.zeros(1))  # so that no turn waits for the other's work alone
        turns.append(_sums(group, torch.ones(WIDTH), (1 - ALONE) * seconds / ROUNDS, work)[0])
    return statistics.fmean(alone), statistics.fmean(turns)


def _sums(group: Group, numbers: torch.Tensor, seconds: float, work: Callable[[], object]) -> tuple[float, int]:
    """Mean seconds of a piece of work and a sum, and of how many."""
    begun, count = time.perf_counter(), 0
    while True:
        work()
        numbers[0] = float(time.perf_counter() - begun < seconds)
        group.all_reduce(numbers)
        count += 1
        if numbers[0] < group.size:  # somebody has no more time
            return (time.perf_counter() - begun) / count, count
        numbers.fill_(1.0)
