"""How long a small sum takes between two ranks that compute in between: each comes when its work is done, and wakes up.

In a loop that does nothing else a message is there within some tens of microseconds. After work that went through
memory it takes several times that: caches are cold, and neither rank comes when the other does. What of a turn is the
work's, the way's, and lost, `planner.cost.message_time` tells.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch

from tllm.comm.collectives.group import Group
from tllm.comm.collectives.tuning import max_over_ranks
from tllm.core.timing import mean_seconds
from tllm.planner.cluster.device import SHORT_MESSAGE_BYTES
from tllm.planner.cost.rank_work import BUCKET_BYTES

WIDTH, ROWS = 1024, 2048
"""Of the matrix that is read in between: 8 MiB, about the half of a layer of a model with a billion parameters."""

SHORT_BYTES = 4 * WIDTH
"""Of a short sum."""

ALONE = 0.25
"""Of the time, for sums alone."""

ROUNDS = 10
"""Of sums and of turns, one after the other: what slows a machine down for a while then slows all."""

EFFORTS = 4
"""Rounds of products alone, and beside long sums."""

FEW, MANY = 1 << 15, SHORT_MESSAGE_BYTES // 2
"""Float32 numbers of a long sum, by what the way carries: 128 KiB to 1 MiB, of which the half is brief."""

TURNS = 2
"""Of long sums, and of the half of them, one after the other."""

LONGEST = BUCKET_BYTES // 4
"""Float32 numbers of a sum after a rest, at the most: as gradients are summed."""

RESTS, REST = 2, 0.25
"""So many, of so many seconds: longer than a connection keeps its speed while nothing is sent."""

PRODUCT = 256
"""Rows and columns of a matrix that is multiplied while numbers are summed: half a millisecond."""


class Met(msgspec.Struct, frozen=True, tag=True):
    """Mean seconds of a short `sum` alone, and of a `turn`: this rank's `work`, then a sum.

    `rate`: bytes/s of a long sum, `brief`: of brief ones; `effort`: seconds by which computing takes longer for each
    byte of them. To serve, if that was measured: `shared`, of a layer that both serve; `ring`: of a token's turn round
    a ring of both that this rank drives, beside their layers.
    """

    work: float
    sum: float
    turn: float
    rate: float
    effort: float
    brief: float
    shared: float | None = None
    ring: float | None = None


def measure_sums(group: Group, seconds: float, rests: bool = False) -> Met:
    """Both ranks of a group call this. They sum numbers for about so many seconds, short sums in half of it.

    With `rests` long sums come after a rest, as those of gradients do, unless there is less time than for one.
    """
    work, short, turn = _short(group, seconds / 2)
    numbers = _long(group, seconds / 6)
    half = numbers[: len(numbers) // 2]
    brief, long = _by_turns(group, [half, numbers], seconds / 3)
    brief_rate, rate = half.nbytes / max(brief - short, 1e-9), numbers.nbytes / max(long - short, 1e-9)
    if len(numbers) < MANY:  # of a slow way a part goes at once after a rest, and less of it the longer a message is
        brief_rate = rate = half.nbytes / max(long - brief, 1e-9)
    if rests and seconds > REST:
        rate = _rate_after_rest(group, _as_long_as(group, seconds, len(numbers), long), short)
    return Met(work, short, turn, rate, _effort(group, numbers, seconds / 6), brief_rate)


def _effort(group: Group, numbers: torch.Tensor, seconds: float) -> float:
    """Seconds by which computing takes longer for each byte that is summed meanwhile.

    Not what the processor takes for sums alone: a thread that only waits wakes up for every packet of a slow way.
    """
    x = torch.ones(PRODUCT, PRODUCT)
    share, lost, sums = seconds / (2 * EFFORTS), 0.0, 0
    beside = share
    for _ in range(EFFORTS):
        alone = mean_seconds(lambda: x @ x, beside)
        first, goes_on = time.perf_counter(), True
        while goes_on:
            numbers.fill_(1.0)
            numbers[0] = float(time.perf_counter() < first + share)
            begun, products, handle = time.perf_counter(), 0, group.start.all_reduce(numbers)
            while not handle.done:
                x @ x
                products += 1
            lost += time.perf_counter() - begun - products * alone
            sums += 1
            goes_on = bool(handle.wait()[0] == group.size)
        beside = time.perf_counter() - first  # for as long alone as it was beside sums: neither is truer than the other
    group.start.close()
    return max(0.0, lost) / (sums * numbers.nbytes)


def _long(group: Group, seconds: float) -> torch.Tensor:
    """As many numbers as take so many seconds. Sums grow up to it, as a connection does."""
    count = FEW
    while True:
        slowest = max_over_ranks(group, _sums(group, torch.ones(count), 0.0).sum)
        if count == MANY or slowest > seconds:
            return torch.ones(count)
        count *= 2


def _rate_after_rest(group: Group, count: int, short: float) -> float:
    """Bytes per second of a sum of so many numbers, as gradients have after a backward pass.

    A connection that has rested begins anew, and sends more than its way takes until that loses some (RFC 5681): 16 MiB
    over 100 Mbit/s take 5 to 20 % longer than 32 times half a MiB. Ranks come together, or one after the other. A sum
    has ended when a `short` one after it has, and begun when the later rank has.
    """
    numbers, one, taken = torch.ones(count), torch.ones(1), list[float]()
    for number in range(RESTS):
        time.sleep(REST * (1 + number % 2 * group.rank))
        begun = time.perf_counter()
        group.all_reduce(numbers)
        group.all_reduce(one)
        taken.append(-max_over_ranks(group, begun - time.perf_counter()))
    return numbers.nbytes / max(statistics.fmean(taken) - short, 1e-9)


def _as_long_as(group: Group, seconds: float, count: int, taken: float) -> int:
    """How many numbers a sum takes so many seconds of, if `count` of them took so many; alike on all ranks."""
    return max(count, min(LONGEST, int(count * seconds / max_over_ranks(group, taken))))


def _by_turns(group: Group, sums: list[torch.Tensor], seconds: float) -> list[float]:
    """Mean seconds of a sum of each, so that a connection that still gains speed, or a machine, is the same for all."""
    share = seconds / (TURNS * len(sums))
    found = [[_sums(group, one, share).sum for one in sums] for _ in range(TURNS)]
    return [statistics.fmean(one) for one in zip(*found, strict=True)]


def _short(group: Group, seconds: float) -> tuple[float, float, float]:
    """(this rank's work in a turn, a sum alone, a turn of both), each in the middle of its rounds.

    The work alone would be of other moments, and by what a machine's speed changes in between, meetings would seem to
    cost more, or nothing; and they cost nothing of what a machine was held up by for once.
    """
    weight, x = torch.full((ROWS, WIDTH), 0.01), torch.ones(WIDTH)
    share = seconds / ROUNDS
    works, sums, turns = list[float](), list[float](), list[float]()
    for _ in range(ROUNDS):
        sums.append(_sums(group, torch.ones(WIDTH), ALONE * share).sum)
        found = _sums(group, torch.ones(WIDTH), (1 - ALONE) * share, lambda: torch.mv(weight, x))
        works.append(found.work)
        turns.append(found.work + found.sum)
    return statistics.median(works), statistics.median(sums), statistics.median(turns)


class _Summed(NamedTuple):
    """Mean seconds of a piece of work, and of the sum after it."""

    work: float
    sum: float


def _sums(group: Group, numbers: torch.Tensor, seconds: float, work: Callable[[], object] = lambda: None) -> _Summed:
    """Work and sum again and again, for about so many seconds."""
    begun, count, worked, summed = time.perf_counter(), 0, 0.0, 0.0
    while True:
        start = time.perf_counter()
        work()
        done = time.perf_counter()
        numbers.fill_(1.0)
        numbers[0] = float(done - begun < seconds)
        ready = time.perf_counter()
        group.all_reduce(numbers)
        worked, summed, count = worked + done - start, summed + time.perf_counter() - ready, count + 1
        if numbers[0] < group.size:  # somebody has no more time
            return _Summed(worked / count, summed / count)
