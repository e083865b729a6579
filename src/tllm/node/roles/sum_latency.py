"""How long all-reduces of two ranks take: of small sums between pieces of work, and of large ones.

In a loop that does nothing else a message arrives within some tens of microseconds. After work that has gone through
memory it takes several times that: caches are cold, threads must wake up, and the ranks do not arrive at the same time.
`planner.cost.message_time` divides the measured turn into work, network latency and what is lost.
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
from tllm.devices.choose import CPU
from tllm.devices.memory import completed
from tllm.planner.cluster.device import SHORT_MESSAGE_BYTES
from tllm.planner.cost.rank_work import BUCKET_BYTES

WIDTH, ROWS = 1024, 2048
"""Size of the matrix that is read between two sums: 8 MiB, about half a layer of a model with a billion parameters."""

SHORT_BYTES = 4 * WIDTH
"""Size of a short sum."""

ALONE = 0.25
"""The part of the time in which short sums are measured without work between them."""

ROUNDS = 10
"""Rounds in which sums alone and turns are measured alternately, so that what slows a machine down for a while slows
both alike."""

EFFORTS = 4
"""Rounds in which matrix products are timed alone and then during long sums."""

FEW, MANY = 1 << 15, SHORT_MESSAGE_BYTES // 2
"""Float32 numbers of a long sum, depending on the network's speed: 128 KiB to 1 MiB. Half as many are a brief sum."""

TURNS = 2
"""Rounds in which long sums and brief ones are measured alternately."""

LONGEST = BUCKET_BYTES // 4
"""The most float32 numbers of a sum after a rest: a bucket, as gradients are summed."""

RESTS, REST = 2, 0.25
"""How many rests, and the seconds of each: longer than a TCP connection keeps its rate while nothing is sent."""

PRODUCT = 256
"""Rows and columns of the matrix that is multiplied while numbers are summed: a product takes half a millisecond."""


class Met(msgspec.Struct, frozen=True, tag=True):
    """What two ranks that met measured. All times are in seconds.

    sum: a short sum alone.
    turn: this rank's `work`, then a short sum.
    rate: bytes per second of a long sum; `brief`: of a brief one.
    effort: by how much computing takes longer for each byte that is summed meanwhile.
    shared: a layer that both ranks compute together; None where that was not measured.
    ring: a token's turn round a pipeline of both that this rank drives, without their layers; None where not measured.
    by_links: whether the sums went by the links of both ranks, as what a pipeline hands on does, or by memory that they
        share or NCCL.
    """

    work: float
    sum: float
    turn: float
    rate: float
    effort: float
    brief: float
    shared: float | None = None
    ring: float | None = None
    by_links: bool = True


def measure_sums(group: Group, seconds: float, rests: bool = False, device: torch.device = CPU) -> Met:
    """Both ranks of a group call this, and sum numbers for about so many seconds, half of them short sums.

    Numbers and work of a rank are on its `device`, so that copies to the host and back are a part of its sums.
    With `rests` long sums are measured after a rest, as sums of gradients come, if there is time for one.
    """
    work, short, turn = _short(group, seconds / 2, device)
    numbers = _long(group, seconds / 6, device)
    half = numbers[: len(numbers) // 2]
    brief, long = _by_turns(group, [half, numbers], seconds / 3)
    brief_rate, rate = half.nbytes / max(brief - short, 1e-9), numbers.nbytes / max(long - short, 1e-9)
    if len(numbers) < MANY:
        # On a slow network the first bytes after a rest leave at once, and count for less in a longer message.
        brief_rate = rate = half.nbytes / max(long - brief, 1e-9)
    if rests and seconds > REST:
        rate = _rate_after_rest(group, numbers.new_ones(_as_long_as(group, seconds, len(numbers), long)), short)
    effort, by_links = _effort(group, numbers, seconds / 6), group.memory_sums is None and group.device_links is None
    return Met(work, short, turn, rate, effort, brief_rate, by_links=by_links)


def _effort(group: Group, numbers: torch.Tensor, seconds: float) -> float:
    """Seconds by which computing takes longer for each byte that is summed meanwhile.

    That is not the processor time of sums alone: a thread that only waits is woken for every packet of a slow network.
    """
    x = torch.ones(PRODUCT, PRODUCT, device=numbers.device)
    product = completed(lambda: x @ x, x.device)
    share, lost, sums = seconds / (2 * EFFORTS), 0.0, 0
    beside = share
    for _ in range(EFFORTS):
        alone = mean_seconds(product, beside)
        first, goes_on = time.perf_counter(), True
        while goes_on:
            numbers.fill_(1.0)
            numbers[0] = float(time.perf_counter() < first + share)
            begun, products, handle = time.perf_counter(), 0, group.start(group.all_reduce, numbers)
            while not handle.done:
                product()
                products += 1
            lost += time.perf_counter() - begun - products * alone
            sums += 1
            goes_on = bool(handle.wait()[0] == group.size)
        beside = (
            time.perf_counter() - first
        )  # products alone are timed for as long as those during sums, so that both are equally exact
    return max(0.0, lost) / (sums * numbers.nbytes)


def _long(group: Group, seconds: float, device: torch.device) -> torch.Tensor:
    """As many numbers as take so many seconds. The sums grow to that, and with them the connection's rate."""
    count = FEW
    while True:
        slowest = max_over_ranks(group, _sums(group, torch.ones(count, device=device), 0.0).sum)
        if count == MANY or slowest > seconds:
            return torch.ones(count, device=device)
        count *= 2


def _rate_after_rest(group: Group, numbers: torch.Tensor, short: float) -> float:
    """Bytes per second of a sum of these numbers, as gradients have after a backward pass.

    A connection that was idle begins with slow start, and then sends more than the network carries until packets are
    lost (RFC 5681): 16 MiB over 100 Mbit/s take 5 to 20 % longer than 32 times half a MiB. In every other round one
    rank arrives later than the other. A sum has begun when the later rank has, and has ended when a `short` one after
    it has; the seconds of the latter are taken off.
    """
    one, taken = numbers.new_ones(1), list[float]()
    for number in range(RESTS):
        time.sleep(REST * (1 + number % 2 * group.rank))
        begun = time.perf_counter()
        group.all_reduce(numbers)
        group.all_reduce(one)
        taken.append(-max_over_ranks(group, begun - time.perf_counter()))
    return numbers.nbytes / max(statistics.fmean(taken) - short, 1e-9)


def _as_long_as(group: Group, seconds: float, count: int, taken: float) -> int:
    """How many numbers are summed in `seconds`, if `count` of them took `taken` seconds; the same on all ranks."""
    return max(count, min(LONGEST, int(count * seconds / max_over_ranks(group, taken))))


def _by_turns(group: Group, sums: list[torch.Tensor], seconds: float) -> list[float]:
    """Mean seconds of a sum of each, measured alternately: a connection that still gains speed, or a machine that slows
    down, then affects all alike."""
    share = seconds / (TURNS * len(sums))
    found = [[_sums(group, one, share).sum for one in sums] for _ in range(TURNS)]
    return [statistics.fmean(one) for one in zip(*found, strict=True)]


def _short(group: Group, seconds: float, device: torch.device) -> tuple[float, float, float]:
    """Seconds of (this rank's work in a turn, a sum alone, a turn of both), each the median over the rounds.

    The work is timed within turns: timed apart, it would be of other moments, and any change of the machine's speed in
    between would look like a cost of the sum. The median leaves out what held a machine up only once.
    """
    weight, x = torch.full((ROWS, WIDTH), 0.01, device=device), torch.ones(WIDTH, device=device)
    read = completed(lambda: torch.mv(weight, x), device)
    share = seconds / ROUNDS
    works, sums, turns = list[float](), list[float](), list[float]()
    for _ in range(ROUNDS):
        sums.append(_sums(group, torch.ones(WIDTH, device=device), ALONE * share).sum)
        found = _sums(group, torch.ones(WIDTH, device=device), (1 - ALONE) * share, read)
        works.append(found.work)
        turns.append(found.work + found.sum)
    return statistics.median(works), statistics.median(sums), statistics.median(turns)


class _Summed(NamedTuple):
    """Mean seconds of a piece of work, and of the sum that follows it."""

    work: float
    sum: float


def _sums(group: Group, numbers: torch.Tensor, seconds: float, work: Callable[[], object] = lambda: None) -> _Summed:
    """Work and sum alternately for about so many seconds; all ranks stop after the same sum."""
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
