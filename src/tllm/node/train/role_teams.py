"""Which nodes form a team, to compute one model of a role together, and which of them gets which part."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from tllm.cluster.state import Member
from tllm.spec.plan import Plan

FIRST_SECONDS = 2.0
"""Until a team is tried again that did not come together: who is lost is known by then."""

MOST_SECONDS = 120.0
"""The same after many times."""

Team = Sequence[Member]
Process = tuple[str, int]
"""A node's name, and its process: one that comes anew may be reached where the one before was not."""


class FailedTeams:
    """Teams that did not come together, though none of their nodes is lost: each is left alone for twice as long after
    each time, so that two nodes which cannot reach each other do not read their weights over and over. Who was in most
    of them is taken last, as it may be the one that nobody reaches."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known = dict[frozenset[Process], tuple[float, float]]()  # how long it is left alone, and until when
        self._failures = Counter[Process]()  # since it last came together with others

    def failed(self, team: Team) -> float:
        """It did not come together. The seconds for which it is left alone."""
        seconds, _ = self._known.get(_processes(team), (FIRST_SECONDS / 2, 0.0))
        seconds = min(2 * seconds, MOST_SECONDS)
        self._known[_processes(team)] = seconds, self._clock() + seconds
        self._failures.update(_processes(team))
        return seconds

    def met(self, team: Team) -> None:
        """It came together."""
        self._known.pop(_processes(team), None)
        for process in _processes(team):
            self._failures.pop(process, None)

    def forget_gone(self, living: Sequence[Member]) -> None:
        """Nothing is kept of processes that have ended."""
        here = _processes(living)
        self._known = {team: waits for team, waits in self._known.items() if team <= here}
        self._failures = Counter({one: count for one, count in self._failures.items() if one in here})

    def fewest_first(self, members: Sequence[Member]) -> list[Member]:
        """By the times that a team failed with them, else in their order."""
        return sorted(members, key=lambda member: self._failures[_process(member)])

    def may_try(self, team: Team) -> bool:
        """Whether it is not left alone now."""
        _, until = self._known.get(_processes(team), (0.0, -math.inf))
        return self._clock() >= until


def _processes(team: Team) -> frozenset[Process]:
    return frozenset(map(_process, team))


def _process(member: Member) -> Process:
    return member.node, member.facts.pid


def possible_teams(candidates: Sequence[Member], size: int, spare: int) -> Iterator[tuple[Member, ...]]:
    """Every team of so many candidates, of whom `spare` at most have no role yet; those of the first candidates first.

    What comes next is found at once, however many teams there are with too many who have no role.
    """
    free = sum(member.role is None for member in candidates)
    if len(candidates) - free + min(spare, free) < size:
        return
    if size == 0:
        yield ()
        return
    for at, member in enumerate(candidates):
        left = spare - (member.role is None)
        if left >= 0:
            for others in possible_teams(candidates[at + 1 :], size - 1, left):
                yield member, *others


def larger_parts_first(team: Team, plan: Plan) -> list[Member]:
    """In the order of the plan's ranks: who has more memory gets the larger part of the model; as they are where all
    nodes or all parts are as large."""
    parts = [(stage.stop - stage.start) * share / sum(stage.shares) for stage in plan.stages for share in stage.shares]
    if len(set(parts)) == 1 or len({member.facts.memory_bytes for member in team}) == 1:
        return list(team)
    ranks = sorted(range(len(parts)), key=lambda rank: -parts[rank])
    placed = dict(zip(ranks, sorted(team, key=lambda member: -member.facts.memory_bytes), strict=True))
    return [placed[rank] for rank in range(len(parts))]
