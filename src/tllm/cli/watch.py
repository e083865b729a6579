"""`Watch`: looks after a run whose plan was predicted: what is said in mid-run, moves, what came of it in the end."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from tllm.cli.advice import Adviser, computing_of
from tllm.cli.choosing import TrainingChooser
from tllm.cli.outcome import conclude_training
from tllm.train.metrics import StepRecord

if TYPE_CHECKING:
    from tllm.node.training_run import TrainingRun

KEPT = 1000
"""Newest steps that a run is measured by."""


class Watch:
    """`moves`: to go over to a plan that is faster, where one becomes so."""

    def __init__(self, chooser: TrainingChooser, moves: bool) -> None:
        self._chooser, self._moves = chooser, moves
        self._adviser: Adviser | None = Adviser(chooser)
        self._records = deque[StepRecord](maxlen=KEPT)

    def stepped(self, record: StepRecord, run: TrainingRun) -> str:
        """After a step: what is to be said, if anything. Moves the run, if it should."""
        from tllm.node.lasting_run import LastingRun

        self._records.append(record)
        advice = self._adviser.stepped(record, computing_of(run)) if self._adviser else None
        if advice is None:
            return ""
        if advice.move is None or not self._moves or not isinstance(run, LastingRun):
            return advice.text
        choice, survey = advice.move
        self._chooser.chosen, self._chooser.survey = choice, survey
        placed = choice.placed
        run.move(placed.plan, [placed.cluster.name(device) for device in placed.devices])
        return f"{advice.text}; moves to it"

    def resumed(self, plan: str) -> None:
        """The run goes on in a new epoch: as was planned, or without some nodes, of which nothing was predicted."""
        self.close()
        self._records.clear()
        chosen = self._chooser.chosen
        self._adviser = Adviser(self._chooser) if chosen is not None and str(chosen.placed.plan) == plan else None

    def conclude(self, folder: Path) -> None:
        """Predicted beside measured, of the plan that the run ended with."""
        if self._adviser is not None:
            conclude_training(self._chooser, list(self._records), folder)

    def close(self) -> None:
        if self._adviser is not None:
            self._adviser.close()
