"""How long a small sum takes between two ranks that compute in between: each comes when its work is done, and wakes up.

In a loop that does nothing else a message is there within some tens of microseconds. After work that went through
memory it takes several times that: caches are cold, and neither rank comes when the other does.
"""

from __future__ import annotations

import time

import msgspec
import torch

from tllm.comm.group import Group
from tllm.ground.timing import mean_seconds

WIDTH, ROWS = 1024, 2048
"""Of the matrix that is read in between: 8 MiB, about the half of a layer of a model with a billion parameters."""

ALONE = 0.3
"""Of the time, for the work alone."""


class Met(msgspec.Struct, frozen=True, tag=True):
    """Mean seconds of a sum, the work of the slower rank left out."""

    seconds: float


def meeting_seconds(group: Group, seconds: float) -> float:
    """Both ranks of a group call this: they sum some numbers after each piece of work, for about so many seconds."""
    weight, x = torch.full((ROWS, WIDTH), 0.01), torch.ones(WIDTH)

    def work() -> None:
        torch.mv(weight, x)

    alone = torch.tensor([mean_seconds(work, ALONE * seconds)], dtype=torch.float64)
    group.all_reduce(alone, "max")
    numbers, count = torch.ones(WIDTH), 0
    begun = time.perf_counter()
    while True:
        work()
        numbers[0] = float(time.perf_counter() - begun < (1 - ALONE) * seconds)
        group.all_reduce(numbers)
        count += 1
        if numbers[0] < group.size:  # somebody has no more time
            break
        numbers.fill_(1.0)
    return max(0.0, (time.perf_counter() - begun) / count - float(alone))
