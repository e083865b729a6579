"""While a run goes on: that its machines or links are slower than they were, and what another plan would gain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tllm.cli.planning.plan_chooser import TrainingChooser
from tllm.planner.cluster.device import Cluster
from tllm.planner.measured.survey import Survey
from tllm.planner.search.drift import CHANGED, DriftDetector, Slowdown, replan_gain, slowed_survey
from tllm.planner.search.training_search import TrainingChoice
from tllm.train.report.metrics import StepRecord

if TYPE_CHECKING:
    from tllm.node.train.open_training import TrainingRun


COMPUTING = "computing"
"""Among a rank's numbers, that which tells how fast it is."""

QUIET_SECONDS = 60.0
"""Of steps, between one word and the next."""

WORTH = 0.05
"""The least gain that is spoken of."""


@dataclass(frozen=True)
class Advice:
    """What is to be said; a plan that is worth a move, and the survey of machines as they are now."""

    text: str
    move: tuple[TrainingChoice, Survey] | None = None


class Adviser:
    """Of a run whose plan was predicted. The search is beside the run, one at a time."""

    def __init__(self, chooser: TrainingChooser) -> None:
        assert chooser.chosen is not None and chooser.survey is not None, "a plan was predicted"
        self.chooser, self.survey, self.placed = chooser, chooser.survey, chooser.chosen.placed
        self._drift = DriftDetector(len(self.placed.devices))
        self._task: asyncio.Task[tuple[float, TrainingChoice]] | None = None
        self._found: Slowdown | None = None
        self._since = QUIET_SECONDS  # of steps, after the last word

    def stepped(self, record: StepRecord, computing: Sequence[float]) -> Advice | None:
        """After a step, of which each rank computed so long."""
        if self._task is not None and self._task.done():
            (share, other), self._task = self._task.result(), None
            return self._told(share, other)
        if len(computing) != len(self.placed.devices):
            return None  # the run goes on without some
        self._drift.record_step(record.seconds, computing)
        self._since += record.seconds
        drift = self._drift.new_slowdown() if self._task is None and self._since > QUIET_SECONDS else None
        if drift is not None:
            self._found, self._since = drift, 0.0
            self._task = asyncio.create_task(
                asyncio.to_thread(replan_gain, self.placed, self.survey, drift, self._best)
            )
        return None

    def close(self) -> None:
        """A search that is under way is for nothing."""
        if self._task is not None:
            self._task.cancel()

    def _best(self, cluster: Cluster) -> TrainingChoice:
        return self.chooser.best(cluster, (self.placed.facts.microbatch_size,)).choices[0]

    def _told(self, share: float, other: TrainingChoice) -> Advice:
        assert self._found is not None, "a search has a reason"
        plan = other.placed.plan
        names = [self.placed.cluster.name(device) for device in other.placed.devices]
        found = (
            f"{', '.join(changes(self._found, [self._name(rank) for rank in range(len(self._found.rank_factors))]))}: "
        )
        now = slowed_survey(self.survey, self.placed.devices, self._found)
        if share < WORTH:
            return Advice(found + "no other plan would be much faster")
        return Advice(found + f"plan {plan} on {' '.join(names)} would be {100 * share:.0f} % faster", (other, now))

    def _name(self, rank: int) -> str:
        return self.placed.cluster.name(self.placed.devices[rank])


def computing_of(run: TrainingRun) -> list[float]:
    """Seconds that each rank last said it computed in a step."""
    return [member.beat.stats.get(COMPUTING, 0.0) for member in run.state.ranks]


def changes(drift: Slowdown, names: Sequence[str]) -> list[str]:
    """What has changed since the beginning, in words."""
    said = [
        f"{name} takes {factor:.2g} times as long to compute as in the beginning"
        for name, factor in zip(names, drift.rank_factors, strict=True)
        if not 1 / CHANGED < factor < CHANGED
    ]
    if not 1 / CHANGED < drift.link_factor < CHANGED:
        said.append(f"messages take {drift.link_factor:.2g} times as long")
    return said or ["all is again as in the beginning"]
