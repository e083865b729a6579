"""`DriftDetector`: how much slower ranks compute and links carry than when a training run began. `replan_gain`: what
another plan would gain by that.

Ranks that all-reduce in every layer wait for each other there, so a tensor-parallel stage is as slow as its slowest
rank, and each of its ranks is taken to be so slow.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from tllm.planner.cluster.device import Cluster
from tllm.planner.measured.outcome import WARM
from tllm.planner.measured.survey import Survey, cluster_of
from tllm.planner.search.training_search import TrainingChoice
from tllm.planner.simulate.placed_plan import PlacedPlan

BEGINNING, LATELY = 10, 15
"""Steps over which a median is taken, at the beginning and now."""

CHANGED = 1.3
"""A speed that changed by a smaller factor counts as unchanged."""

WAITING = 0.1
"""The share of a step below which time spent waiting says nothing about links."""


@dataclass(frozen=True)
class Slowdown:
    """Seconds now over those in the beginning."""

    rank_factors: tuple[float, ...]
    """Of what each rank computes."""
    link_factor: float = 1.0
    """Of messages."""

    def differs(self, other: Slowdown) -> bool:
        """Whether some speed changed between the two."""
        pairs = zip((*self.rank_factors, self.link_factor), (*other.rank_factors, other.link_factor), strict=True)
        return any(not 1 / CHANGED < a / b < CHANGED for a, b in pairs)


class DriftDetector:
    """Follows the steps of one plan. `reported` is the slowdown that was last returned."""

    def __init__(self, ranks: int) -> None:
        self.reported = Slowdown((1.0,) * ranks)
        self._steps = 0
        self._first: list[tuple[float, ...]] = []
        self._last = deque[tuple[float, ...]](maxlen=LATELY)

    def record_step(self, seconds: float, computing: Sequence[float]) -> None:
        """A step took so many seconds, of which each rank has been `computing` for so many."""
        self._steps += 1
        if self._steps > WARM and min(computing) > 0:
            steps = self._first if len(self._first) < BEGINNING else self._last
            steps.append((*computing, max(0.0, seconds - max(computing)), seconds))

    def new_slowdown(self) -> Slowdown | None:
        """The slowdown now, if it differs from the one last reported; it counts as reported from here on."""
        now = self._now() if len(self._last) == LATELY else None
        if now is None or not now.differs(self.reported):
            return None
        self.reported = now
        self._last.clear()
        return now

    def _now(self) -> Slowdown:
        both = (self._first, self._last)
        before, after = ([statistics.median(column) for column in zip(*rows, strict=True)] for rows in both)
        ranks = tuple(b / a for a, b in zip(before[:-2], after[:-2], strict=True))
        waits = before[-2] > WAITING * before[-1] or after[-2] > WAITING * after[-1]
        least = WAITING * before[-1]
        return Slowdown(ranks, max(after[-2], least) / max(before[-2], least) if waits else 1.0)


def slowed_survey(survey: Survey, devices: Sequence[int], drift: Slowdown) -> Survey:
    """The survey with machines and links as slow as they are now. `devices[rank]` is the index of a rank's node in
    it."""
    slower = dict(zip(devices, drift.rank_factors, strict=True))
    nodes = tuple(node.slower(slower.get(index, 1.0)) for index, node in enumerate(survey.nodes))
    paths = tuple(path.slower(drift.link_factor) for path in survey.paths)
    return msgspec.structs.replace(survey, nodes=nodes, paths=paths)


def replan_gain(
    placed: PlacedPlan, survey: Survey, drift: Slowdown, best: Callable[[Cluster], TrainingChoice]
) -> tuple[float, TrainingChoice]:
    """The share by which the best plan for machines as they are now is faster than this one (0.1: 10 %), and that
    plan."""
    cluster = cluster_of(slowed_survey(survey, placed.devices, drift), placed.spec)
    now, other = replace(placed, cluster=cluster).predict().seconds, best(cluster)
    return now / other.predicted.seconds - 1, other
