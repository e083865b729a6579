"""During a training run: whether its machines or links have become slower, and what another plan would gain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tllm.cli.planning.plan_chooser import TrainingChooser
from tllm.core.errors import CapacityError, PlanError
from tllm.planner.cluster.device import Cluster
from tllm.planner.measured.survey import Survey
from tllm.planner.search.drift import CHANGED, DriftDetector, Slowdown, replan_gain, slowed_survey
from tllm.planner.search.training_search import TrainingChoice
from tllm.training.report.metrics import StepRecord

if TYPE_CHECKING:
    from tllm.node.train.open_training import TrainingRun


COMPUTING = "computing"
"""The key of a rank's statistics that says for how many seconds it computed in a step."""

QUIET_SECONDS = 60.0
"""Seconds of steps between one advice and the next."""

WORTH = 0.05
"""The smallest gain that is worth an advice."""


@dataclass(frozen=True)
class Advice:
    """What to print; and a plan that is worth moving to, with the survey of machines as they are now."""

    text: str
    move: tuple[TrainingChoice, Survey] | None = None


class Adviser:
    """Advises a run whose plan was predicted. It searches in another thread, one search at a time."""

    def __init__(self, chooser: TrainingChooser) -> None:
        assert chooser.chosen is not None and chooser.survey is not None, "a plan was predicted"
        self.chooser, self.survey, self.placed = chooser, chooser.survey, chooser.chosen.placed
        self._drift = DriftDetector(len(self.placed.devices))
        self._task: asyncio.Task[tuple[float, TrainingChoice]] | None = None
        self._slowdown: Slowdown | None = None
        self._since = QUIET_SECONDS  # seconds of steps since the last advice

    def stepped(self, record: StepRecord, computing: Sequence[float]) -> Advice | None:
        """Called after each step, of which each rank computed for so many seconds."""
        if self._task is not None and self._task.done():
            found, self._task = self._task, None
            try:
                return self._advice(*found.result())
            except (CapacityError, PlanError) as error:  # the plan was given, and what is searched has no such one
                return Advice(f"{self._changed()}: no other plan is found: {error.message}")
        if len(computing) != len(self.placed.devices):
            return None  # the run goes on without some ranks
        self._drift.record_step(record.seconds, computing)
        self._since += record.seconds
        drift = self._drift.new_slowdown() if self._task is None and self._since > QUIET_SECONDS else None
        if drift is not None:
            self._slowdown, self._since = drift, 0.0
            self._task = asyncio.create_task(
                asyncio.to_thread(replan_gain, self.placed, self.survey, drift, self._best)
            )
        return None

    def close(self) -> None:
        """Cancel a search that is under way."""
        if self._task is not None:
            self._task.cancel()

    def _best(self, cluster: Cluster) -> TrainingChoice:
        return self.chooser.best_as_chosen(cluster, (self.placed.facts.microbatch_size,))

    def _advice(self, share: float, other: TrainingChoice) -> Advice:
        assert self._slowdown is not None, "a search follows a slowdown"
        plan, reason = other.placed.plan, f"{self._changed()}: "
        names = [self.placed.cluster.name(device) for device in other.placed.devices]
        now = slowed_survey(self.survey, self.placed.devices, self._slowdown)
        if share < WORTH:
            return Advice(reason + "no other plan would be much faster")
        return Advice(reason + f"plan {plan} on {' '.join(names)} would be {100 * share:.0f} % faster", (other, now))

    def _changed(self) -> str:
        """What the last search was about, in words."""
        assert self._slowdown is not None, "a search follows a slowdown"
        return ", ".join(changes(self._slowdown, [self.placed.cluster.name(device) for device in self.placed.devices]))


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
