"""Seconds that messages and all-reduces take, from each link's latency L (seconds) and bandwidth B (bytes per second).

    S bytes one way             L + S / B, and M where the sender was computing until then
    an all-reduce over n ranks  the less of  M + L + (n - 1) S / B              each rank sends all to every other
                                and          2 (M + L) + 2 (n - 1) / n S / B    reduce-scatter, then all-gather

M is the synchronization overhead: what is lost when ranks meet that compute in between, because caches are cold and
threads have to wake up. It is measured (`LinkSpeed.sync_overhead`).

Ranks of unequal speed that compute and all-reduce in alternation do not pay both for the slowest rank's work and for
the message: the faster rank's message travels while the slower one still works. If W is the time that the slowest rank
works before the all-reduce and V that of the next slowest, one repetition takes

    max(W + S e, (W + V) / 2 + L + S / B) + M

seconds, where e is what each byte that the slowest rank sends and receives costs its own computing (seconds per byte).
This is the greatest mean weight of a cycle in the graph of who waits for whom (Baccelli, Cohen, Olsder and Quadrat
1992, Synchronization and Linearity, chapter 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tllm.core.errors import PlanError
from tllm.planner.cluster.device import LinkSpeed
from tllm.spec.plan import Plan


class TimeBreakdown(NamedTuple):
    """Seconds by what they are spent on. Their sum is `seconds`."""

    compute: float = 0.0
    """Matrix products."""
    memory: float = 0.0
    """Reading weights, keys and values from memory."""
    operations: float = 0.0
    """Starting operations, whatever their size."""
    sending: float = 0.0
    """Bytes divided by bandwidth."""
    latency: float = 0.0
    """Bytes on their way, and synchronization overhead."""

    @property
    def seconds(self) -> float:
        return self.compute + self.memory + self.operations + self.sending + self.latency

    def plus(self, other: TimeBreakdown) -> TimeBreakdown:
        """Both one after the other."""
        return TimeBreakdown(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: float) -> TimeBreakdown:
        """The same so many times."""
        return TimeBreakdown(*(count * seconds for seconds in self))


def transfer_time(size: float, link: LinkSpeed) -> TimeBreakdown:
    """`size` bytes one way over a link."""
    return TimeBreakdown(sending=size / link.rate(size), latency=link.latency)


def transfer_after_compute(size: float, link: LinkSpeed) -> TimeBreakdown:
    """`size` bytes one way, from a rank that was computing to one that was waiting."""
    return transfer_time(size, link).plus(TimeBreakdown(latency=link.sync_overhead))


def all_reduce_time(ranks: int, size: float, link: LinkSpeed) -> TimeBreakdown:
    """An all-reduce of `size` bytes among ranks that all reach one another over `link`; nothing for a single rank."""
    if ranks == 1:
        return TimeBreakdown()
    overhead = TimeBreakdown(latency=link.sync_overhead)
    direct = transfer_time((ranks - 1) * size, link).plus(overhead)
    two_phases = transfer_time((ranks - 1) / ranks * size, link).plus(overhead).times(2)
    return min(direct, two_phases, key=lambda breakdown: breakdown.seconds)


def compute_and_all_reduce_time(
    works: Sequence[TimeBreakdown], all_reduces: TimeBreakdown, overhead: float
) -> TimeBreakdown:
    """One repetition of: each rank computes for so long (`works`), then all ranks all-reduce.

    `all_reduces` is the time of these messages. `overhead` are seconds lost in synchronizing and sending that remain
    even where every message has arrived early. The slowest rank waits for the next slowest for half of the time by
    which that one is behind, or not at all (see the module's formula).
    """
    slowest, *others = sorted(works, key=lambda work: work.seconds, reverse=True)
    if not others:
        return slowest
    waiting = slowest.plus(others[0]).times(0.5).plus(all_reduces)
    return max(slowest.plus(TimeBreakdown(latency=overhead)), waiting, key=lambda breakdown: breakdown.seconds)


def measured_sync_overhead(
    repetition: float, works: tuple[float, float], transfer: float, all_reduce_alone: float
) -> float:
    """M in seconds, from a measured `repetition` of computing and all-reducing on two ranks.

    It is at least what an all-reduce repeated alone takes more than its `transfer`. All arguments are seconds.
    """
    return max(0.0, all_reduce_alone - transfer, unexplained_seconds(repetition, works, transfer))


def unexplained_seconds(
    repetition: float, works: tuple[float, float], transfer: float, sending_overhead: float = 0.0
) -> float:
    """A measured `repetition`, less what the module's formula explains by the work of two ranks, the `transfer` of a
    message, and the computing that `sending_overhead` costs the slower rank. All are seconds."""
    return repetition - max(max(works) + sending_overhead, sum(works) / 2 + transfer)


def group_link(links: LinkSpeed | Mapping[str, LinkSpeed], group: str) -> LinkSpeed:
    """The link that a group of ranks sends over. Raises PlanError where none is given for it."""
    if isinstance(links, LinkSpeed):
        return links
    if group not in links:
        raise PlanError(f"no speed is given for the links of {group}", f"given: {', '.join(sorted(links))}")
    return links[group]


def sending_seconds(sent: float, link: LinkSpeed, messages: int = 1) -> float:
    """Seconds for `sent` bytes in so many equal messages, one after another; nothing for no bytes.

    Each message pays the link's latency and its synchronization overhead; without a count (0) the latency alone is paid
    once.
    """
    if not sent:
        return 0.0
    each = sent / messages if messages else math.inf
    return sent / link.rate(each) + max(1, messages) * link.latency + messages * link.sync_overhead


def stage_overheads(hops: LinkSpeed | Mapping[tuple[int, int], LinkSpeed], plan: Plan) -> list[float]:
    """For each pipeline stage, seconds of computing lost for each byte of one microbatch's rows, over its slowest link.

    A link's `compute_overhead` is for one byte received and one sent: half of it counts for each neighbour, of which
    the first and the last stage have only one unless the stages form a ring.
    """
    is_ring, overheads = plan.chunks > 1, list[float]()
    for stage in range(plan.pp):
        links = [hops] if isinstance(hops, LinkSpeed) else [link for (here, _), link in hops.items() if here == stage]
        neighbours = (is_ring or stage > 0) + (is_ring or stage + 1 < plan.pp)
        overheads.append(neighbours / 2 * max((link.compute_overhead for link in links), default=0.0))
    return overheads
