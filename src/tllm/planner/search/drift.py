"""`DriftDetector`: how much slower each rank computes, and links carry, than when the run began; and another plan's gain by it.

Ranks that sum in every layer wait for each other there, so a tensor-parallel stage is as slow as its slowest rank, and
so each of them is taken to be.
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
"""Steps whose median counts, of the beginning and now."""

CHANGED = 1.3
"""A change of speed by less is none."""

WAITING = 0.1
"""Of a step: where less is waited, links are no matter."""


@dataclass(frozen=True)
class Slowdown:
    """`ranks[r]`: how many times as long rank r computes as in the beginning; `link_factor`: as long messages take."""

    rank_factors: tuple[float, ...]
    link_factor: float = 1.0

    def differs(self, other: Slowdown) -> bool:
        """Whether some speed is another."""
        pairs = zip((*self.rank_factors, self.link_factor), (*other.rank_factors, other.link_factor), strict=True)
        return any(not 1 / CHANGED < a / b < CHANGED for a, b in pairs)


class DriftDetector:
    """Follows the steps of one plan. `reported` is what was last acted upon."""

    def __init__(self, ranks: int) -> None:
        self.reported = Slowdown((1.0,) * ranks)
        self._steps = 0
        self._first: list[tuple[float, ...]] = []
        self._last = deque[tuple[float, ...]](maxlen=LATELY)

    def record_step(self, seconds: float, computing: Sequence[float]) -> None:
        """A step took so long, of which each rank has computed so long."""
        self._steps += 1
        if self._steps > WARM and min(computing) > 0:
            kept = self._first if len(self._first) < BEGINNING else self._last
            kept.append((*computing, max(0.0, seconds - max(computing)), seconds))

    def new_slowdown(self) -> Slowdown | None:
        """What is another speed than was last told, if one is; it is told with this."""
        now = self._now() if len(self._last) == LATELY else None
        if now is None or not now.differs(self.reported):
            return None
        self.reported = now
        self._last.clear()
        return now

    def _now(self) -> Slowdown:
        before, after = ([statistics.median(column) for column in zip(*rows, strict=True)] for rows in self._both())
        ranks = tuple(b / a for a, b in zip(before[:-2], after[:-2], strict=True))
        waits = before[-2] > WAITING * before[-1] or after[-2] > WAITING * after[-1]
        least = WAITING * before[-1]
        return Slowdown(ranks, max(after[-2], least) / max(before[-2], least) if waits else 1.0)

    def _both(self) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        return self._first, list(self._last)


def slowed_survey(survey: Survey, devices: Sequence[int], drift: Slowdown) -> Survey:
    """The survey as machines and links are now. `devices[rank]` is the place of a rank's node in it."""
    slower = dict(zip(devices, drift.rank_factors, strict=True))
    nodes = tuple(node.slower(slower.get(place, 1.0)) for place, node in enumerate(survey.nodes))
    ways = tuple(way.slower(drift.link_factor) for way in survey.paths)
    return msgspec.structs.replace(survey, nodes=nodes, paths=ways)


def replan_gain(
    placed: PlacedPlan, survey: Survey, drift: Slowdown, best: Callable[[Cluster], TrainingChoice]
) -> tuple[float, TrainingChoice]:
    """By what part the best plan for machines as they are now is faster than this one, and that plan."""
    cluster = cluster_of(slowed_survey(survey, placed.devices, drift), placed.spec)
    now, other = replace(placed, cluster=cluster).predict().seconds, best(cluster)
    return now / other.predicted.seconds - 1, other
