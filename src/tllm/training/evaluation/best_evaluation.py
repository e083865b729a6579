"""`BestEvaluation`: a run's best evaluation so far, and how many after it gained nothing (early stopping)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from tllm.core.errors import ConfigError
from tllm.training.evaluation.held_out import Evaluated
from tllm.training.job.job import Job


class Standing(msgspec.Struct, frozen=True):
    """What a save and a snapshot keep. `waited`: evaluations in a row without a gain; `best` is None before any."""

    best: float | None = None
    step: int = 0
    waited: int = 0


class BestEvaluation:
    """The rule of Hugging Face's EarlyStoppingCallback. Evaluations are alike on every rank, so all end at one step.

    ConfigError where the job names a metric that its task, of the metrics `known`, does not tell.
    """

    def __init__(self, job: Job, known: Sequence[str]) -> None:
        self._job = job
        self.name = job.metric_for_best_model.removeprefix("eval_")
        self.standing = Standing()
        if self.name != "loss" and self.name not in known:
            raise ConfigError(
                f"metric_for_best_model is {job.metric_for_best_model!r}, which the task {job.task!r} does not tell",
                f"known: {', '.join(('loss', *known))}",
            )

    @property
    def reason(self) -> str:
        """Why the run ends early; "" while it goes on."""
        patience, now = self._job.early_stopping_patience, self.standing
        if not patience or now.waited < patience:
            return ""
        best = "never a number" if now.best is None else f"at its best {now.best:.6g}, after step {now.step}"
        return f"{now.waited} evaluations without a gain: {self.name} was {best}"

    def add(self, step: int, evaluated: Evaluated) -> None:
        """An evaluation after `step`. A gain above the threshold ends the waiting; a smaller one is the best too."""
        value = evaluated.loss if self.name == "loss" else evaluated.metrics[self.name]
        before = self.standing
        gain = math.inf if before.best is None else self._sign * (value - before.best)
        if math.isnan(value) or gain <= 0:
            self.standing = msgspec.structs.replace(before, waited=before.waited + 1)
        else:
            counts = gain > self._job.early_stopping_threshold
            self.standing = Standing(value, step, 0 if counts else before.waited + 1)

    @property
    def _sign(self) -> int:
        greater = self._job.greater_is_better
        return 1 if (self.name != "loss" if greater is None else greater) else -1
