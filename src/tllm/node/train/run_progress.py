"""`RunProgress`: how far a training run has come over all its epochs, and how often it was interrupted."""

from __future__ import annotations

import math
import time

from tllm.training.report.events import RunBegan

IN_VAIN = 4
"""Interruptions in a row without a new step, after which what causes them is taken for the run's own fault."""


class RunProgress:
    """`step`: the last step that was reported; `done` are those that an earlier command of the run did.

    `has_begun`: rank 0 has reported the beginning of an epoch, to this process or to the coordinator before it.
    `saved`: the step of the last save that is known, 0 if there is none.
    """

    def __init__(self, done: int) -> None:
        self.step = done
        self.has_begun = False
        self.saved = 0
        self.interruptions = 0  # since the last step that had not been done before
        self._furthest = 0
        self._interrupted = math.nan  # when, by time.monotonic(); nan while the run goes on

    @property
    def is_in_vain(self) -> bool:
        """Whether the run is interrupted again and again without a new step."""
        return self.interruptions > IN_VAIN

    @property
    def furthest(self) -> int:
        """The last step that was ever reported."""
        return max(self.step, self._furthest)

    def take_up(self, step: int, saved: int) -> None:
        """Go on with a run that another coordinator has begun, and that is interrupted now."""
        self.step, self._furthest, self.saved, self.has_begun = max(self.step, step), step, saved, True
        self.pause()

    def began(self, event: RunBegan) -> None:
        """An epoch has begun after a step."""
        self.step, self.has_begun = event.step, True

    def stepped(self, step: int) -> None:
        """A step is done."""
        self.step = step
        if step > self._furthest:
            self._furthest, self.interruptions = step, 0

    def is_resumed(self, event: RunBegan) -> bool:
        """Whether what begins is a run that was interrupted before, under this command or an earlier one."""
        return self.has_begun or event.step < self.step or event.origin == "memory"

    def pause(self) -> None:
        """The run is interrupted on purpose."""
        self._interrupted = time.monotonic()

    def interrupt(self) -> None:
        """The run is interrupted by a loss; more losses before it goes on count as the same interruption."""
        if math.isnan(self._interrupted):
            self.pause()
            self.interruptions += 1

    def resume(self) -> float:
        """The run goes on: seconds since it was interrupted."""
        seconds = 0.0 if math.isnan(self._interrupted) else time.monotonic() - self._interrupted
        self._interrupted = math.nan
        return seconds
