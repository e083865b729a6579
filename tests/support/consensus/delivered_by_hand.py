"""Replicas whose messages a test delivers itself, for schedules that are too rare to come by chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tests.support.consensus.simulated_replicas import TIMING, Register, Rules, WatchedLog, place
from tllm.cluster.consensus.raft import Raft
from tllm.cluster.consensus.raft_messages import BATCH_BYTES, RaftMessage, ReplicaPlace

LONG = 100.0  # after which everybody has waited for long enough


class DeliveredByHand:
    """`count` replicas that all vote from the beginning. `sent` has what nobody has delivered yet."""

    def __init__(self, count: int = 3, make: Callable[..., Raft] = Raft) -> None:
        self.now = 0.0
        self.rules = Rules()
        self.places = tuple(place(number) for number in range(count))
        self.sent: list[tuple[int, int, RaftMessage]] = []
        self.replicas = [self._make(number, make) for number in range(count)]
        for raft in self.replicas:
            raft.tick(self.now)

    def _make(self, number: int, make: Callable[..., Raft]) -> Raft:
        def send(to: ReplicaPlace, message: RaftMessage) -> None:
            self.sent.append((number, self.places.index(to), message))

        register = Register(lambda content: None)
        raft = make(self.places[number], self.places, TIMING, random.Random(number), send, register)
        raft.log = WatchedLog(self.places, self.rules, lambda: raft.ballot.term)
        return raft

    def deliver(self, among: Sequence[int]) -> None:
        """Deliver what these replicas send each other, and what they answer, until they are silent; lose the rest."""
        while self.sent:
            source, target, message = self.sent.pop(0)
            if source in among and target in among:
                self.step(target, message)

    def step(self, target: int, message: RaftMessage) -> None:
        raft = self.replicas[target]
        raft.step(message, self.now)
        if raft.leadership is not None:
            self.rules.leads(raft)

    def tick(self, number: int, seconds: float = 0.0) -> None:
        self.now += seconds
        self.replicas[number].tick(self.now)

    def elect(self, number: int, among: Sequence[int], is_heard: bool = True) -> Raft:
        """Let a replica stand after a long silence, again where it learns of a later term, with these voters. Unless it
        `is_heard`, what it then sends as their leader is lost."""
        raft = self.replicas[number]
        for _ in range(3):
            self.tick(number, LONG)
            while self.sent and raft.leadership is None:
                source, target, message = self.sent.pop(0)
                if source in among and target in among:
                    self.step(target, message)
            if raft.leadership is not None:
                self.deliver(among if is_heard else ())
                return raft
        raise AssertionError(f"replica {number} was not elected")


def play_older_term(make: Callable[..., Raft]) -> DeliveredByHand:
    """Figure 3.7 of the thesis: an old entry that a majority has, and that a later leader replaces all the same. So
    nobody may have taken it for committed."""
    group = DeliveredByHand(5, make)
    first = group.elect(0, range(5))
    # The first leader's entry reaches one other, and is too long to share a message with the next.
    assert first.propose(b"x" * (BATCH_BYTES + 1), group.now) is not None
    group.deliver((0, 1))
    group.tick(0, LONG)  # it cannot reach a majority any more
    group.elect(4, (2, 3, 4), is_heard=False)
    group.tick(4, LONG)
    group.elect(0, (0, 2, 3), is_heard=False)
    for _ in range(2):
        group.tick(0, TIMING.heartbeat)
        _hand_on_old_entry(group)
    group.tick(0, LONG)
    group.elect(4, (1, 2, 3, 4))
    return group


def _hand_on_old_entry(group: DeliveredByHand) -> None:
    """The old entry comes to a majority, and nothing of the term in which the first leader leads again."""
    while group.sent:
        source, target, message = group.sent.pop(0)
        is_taken = bool(getattr(message, "entries", ())) and group.replicas[target].log.last_index >= 2
        if {source, target} <= {0, 2, 3} and not is_taken:
            group.step(target, message)
