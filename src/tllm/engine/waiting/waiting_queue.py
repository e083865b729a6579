"""`WaitingQueue`: the sequences that wait for a place in the batch, which of them begins next, and who gives way.

The order follows from `Request.scheduling` alone: lower `priority` first, then the tenant that has had least service
for its weight (`VirtualTokenCounters`), and within a tenant the order of arrival. Where nobody gives priorities and
there is one tenant, that is first come first served. The order never changes what a sequence says: each token follows
from the tokens before it, the seed and the position.

Each `OLDEST_TURN`-th sequence that begins is the one that came first, whatever its priority. So nobody starves: one
with k others before it in order of arrival begins among the next OLDEST_TURN * (k + 1), whatever comes after it.

Where those that run lack memory, the one of the highest `priority` gives way, and of several the youngest, as in vLLM.
Who has given way to a younger one does so no more: those are spared until none is left that has not, and then the
youngest goes. So the oldest of all is set back once at the most.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from tllm.engine.waiting.fair_share import OUTPUT_COST, PROMPT_COST, VirtualTokenCounters
from tllm.spec.request import Request

OLDEST_TURN = 8


class Waiting(Protocol):
    """What the queue knows of a sequence: its place in order of arrival, and its request."""

    key: int
    request: Request


S = TypeVar("S", bound=Waiting)


class WaitingQueue(Generic[S]):
    """Sequences that wait, by priority and tenant. `clock` gives seconds, for those that wait only so long."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.shares = VirtualTokenCounters()
        self._clock = clock
        self._groups: dict[tuple[int, str], list[S]] = {}  # each in order of arrival; none is empty
        self._deadlines: dict[int, tuple[float, S]] = {}  # by key, of those that wait only so long
        self._spared: set[int] = set()  # keys of those that gave way to younger ones
        self._num_begun = 0

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def __iter__(self) -> Iterator[S]:
        """In the order in which they would begin now."""
        counters = self.shares.counters
        groups = sorted(self._groups.items(), key=lambda item: (item[0][0], counters[item[0][1]], item[1][0].key))
        oldest = None
        if groups and self._num_begun % OLDEST_TURN == OLDEST_TURN - 1:
            oldest = min((group[0] for _, group in groups), key=lambda one: one.key)
            yield oldest
        for _, group in groups:
            yield from (sequence for sequence in group if sequence is not oldest)

    def add(self, sequence: S) -> None:
        """One that has just come. Where it waits only so long, it may be among the `expired` later."""
        seconds = sequence.request.scheduling.max_queue_seconds
        # What has given out tokens before a node was lost has begun long ago.
        if seconds is not None and not sequence.request.output_ids:
            self._deadlines[sequence.key] = self._clock() + seconds, sequence
        self.put_back(sequence)

    def put_back(self, sequence: S) -> None:
        """One that has begun and lost its place: it keeps its place in order of arrival, and has no deadline."""
        tenants = {tenant for _, tenant in self._groups}
        if sequence.request.scheduling.tenant not in tenants:
            self.shares.arrive(sequence.request.scheduling.tenant, tenants)
        insort(self._groups.setdefault(_group(sequence), []), sequence, key=lambda other: other.key)

    def preempted_after(self, sequence: S) -> tuple[bool, int, int]:
        """Of those that run, all with higher values give way before this one."""
        is_spared = sequence.key in self._spared
        return not is_spared, 0 if is_spared else sequence.request.scheduling.priority, sequence.key

    def preempt(self, running: list[S]) -> S:
        """Takes the one that gives way from those that run, which are in order of arrival."""
        sequence = max(running, key=self.preempted_after)
        if sequence is not running[-1]:
            self._spared.add(sequence.key)
        running.remove(sequence)
        return sequence

    def forget(self, sequence: S) -> None:
        """One has ended."""
        self._spared.discard(sequence.key)

    def remove(self, sequence: S) -> None:
        """One waits no longer."""
        group = self._groups[_group(sequence)]
        group.remove(sequence)
        if not group:
            del self._groups[_group(sequence)]
        self._deadlines.pop(sequence.key, None)
        self.shares.last = sequence.request.scheduling.tenant

    def begin(self, sequence: S, num_tokens: int) -> None:
        """One begins, with so many tokens to compute before its next one. Found in the cache, they cost nothing."""
        self.remove(sequence)
        self._num_begun += 1
        self._charge(sequence, PROMPT_COST * num_tokens)

    def count_output(self, sequence: S, num_tokens: int) -> None:
        """One has got so many tokens."""
        self._charge(sequence, OUTPUT_COST * num_tokens)

    def expired(self) -> list[S]:
        """Those that have waited for as long as they may; they are still in the queue, and named once."""
        now = self._clock() if self._deadlines else 0.0
        found = [sequence for until, sequence in self._deadlines.values() if until <= now]
        for sequence in found:
            del self._deadlines[sequence.key]
        return found

    def _charge(self, sequence: S, cost: float) -> None:
        scheduling = sequence.request.scheduling
        self.shares.charge(scheduling.tenant, cost, scheduling.weight)


def _group(sequence: Waiting) -> tuple[int, str]:
    return sequence.request.scheduling.priority, sequence.request.scheduling.tenant
