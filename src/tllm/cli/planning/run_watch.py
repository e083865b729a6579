"""`Watch`: watches a training run whose plan was predicted: advice during the run, moves, and the outcome at its
end."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tllm.cli.display.training_plans import roles_elsewhere
from tllm.cli.planning.outcome import conclude_training, training_outcome
from tllm.cli.planning.plan_advice import Adviser, computing_of
from tllm.cli.planning.plan_chooser import TrainingChooser
from tllm.cli.planning.role_outcome import without_roles
from tllm.planner.measured.survey import cluster_of
from tllm.planner.search.training_search import TrainingChoice
from tllm.training.report.metrics import StepRecord

if TYPE_CHECKING:
    from tllm.node.train.training_run import TrainingRun


KEPT = 1000
"""The newest steps, by which a run is measured."""


class Watch:
    """`moves`: whether to move to a plan that becomes faster."""

    def __init__(self, chooser: TrainingChooser, moves: bool) -> None:
        self._chooser, self._moves = chooser, moves
        self._elsewhere = roles_elsewhere(chooser.resolved.job)
        self._adviser: Adviser | None = Adviser(chooser)
        self._records = deque[StepRecord](maxlen=KEPT)
        self._before: TrainingChoice | None = None  # what the run last moved from

    def stepped(self, record: StepRecord, run: TrainingRun) -> str:
        """Called after each step. Returns what to print, if anything, and moves the run if it should."""
        from tllm.node.train.elastic_run import ElasticRun

        record = without_roles(record, self._elsewhere)  # the rest of a step tells how fast the ranks are
        self._records.append(record)
        advice = self._adviser.stepped(record, computing_of(run)) if self._adviser else None
        if advice is None:
            return ""
        if advice.move is None or not self._moves or not isinstance(run, ElasticRun) or not run.is_open:
            return advice.text
        choice, survey = advice.move
        self._before = self._chooser.chosen
        self._chooser.chosen, self._chooser.survey = choice, survey
        placed, predicted = choice.placed, self._chooser.predicted_seconds(choice.placed, choice.predicted)
        run.move(placed.plan, [placed.cluster.name(device) for device in placed.devices], predicted)
        return f"{advice.text}; moves to it"

    def shown(self) -> dict[str, Any] | None:
        """For a page: what is predicted for a step of the present plan, and as `beside` what is measured; None where
        nothing was predicted for it."""
        if self._adviser is None or self._chooser.chosen is None:
            return None
        placed, predicted = self._chooser.chosen.placed, self._chooser.chosen.predicted
        outcome = training_outcome(self._chooser, list(self._records))
        seconds = self._chooser.step_seconds(placed, predicted)
        return {
            "seconds": seconds,
            "tokens_per_second": predicted.tokens_per_second * predicted.seconds / seconds,
            **self._chooser.seconds_by_role(placed, predicted),
            "memory": max(rank.total for rank in self._chooser.chosen.memory),
            "beside": None if outcome is None else msgspec.to_builtins(outcome),
        }

    def resumed(self, plan: str) -> None:
        """The run goes on in a new epoch, with the chosen plan or without some nodes, for which nothing was
        predicted."""
        self.close()
        self._records.clear()
        chosen = self._gone_back(plan) or self._chooser.chosen
        self._adviser = Adviser(self._chooser) if chosen is not None and str(chosen.placed.plan) == plan else None

    def _gone_back(self, plan: str) -> TrainingChoice | None:
        """The choice before the last move, predicted for machines as they are now, if the run went back to it. The plan
        that it went back from is not chosen again."""
        failed, before, self._before = self._chooser.chosen, self._before, None
        if failed is None or before is None or str(failed.placed.plan) == plan or str(before.placed.plan) != plan:
            return None
        assert self._chooser.survey is not None, "a move has one"
        placed = replace(before.placed, cluster=cluster_of(self._chooser.survey, self._chooser.spec))
        self._chooser.refused.add(str(failed.placed.plan))
        self._chooser.chosen = TrainingChoice(placed, placed.predict(), before.memory)
        return self._chooser.chosen

    def conclude(self, folder: Path) -> None:
        """Print and save what was predicted and measured for the plan that the run ended with."""
        if self._adviser is not None:
            conclude_training(self._chooser, list(self._records), folder)

    def close(self) -> None:
        if self._adviser is not None:
            self._adviser.close()
