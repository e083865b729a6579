"""`BestEvaluation`: a run's best evaluation so far, how many since then gained nothing, and how good each save is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tllm.core.errors import ConfigError, counted
from tllm.training.evaluation.held_out import Evaluated
from tllm.training.job.job import Job
from tllm.training.job.job_parts import LM_EVAL

FACT = "evaluations"
"""What a save calls it."""
LESS_IS_BETTER = ("loss", "perplexity", "bits_per_byte")
"""What the names end with of metrics that are smaller for a better model: as in transformers, and lm-eval's own."""


class Standing(msgspec.Struct, frozen=True):
    """What a save and a snapshot keep. `waited`: evaluations in a row without a gain; `best` is None before any.

    `values` are the loss and metrics of the last evaluation, after step `evaluated`, by name; what is no number is left
    out. `rule` is what was compared, and how; "" in a save of a program that did not tell.
    """

    best: float | None = None
    step: int = 0
    waited: int = 0
    evaluated: int = 0
    values: dict[str, float] = {}
    rule: str = ""


class BestEvaluation:
    """The rule of Hugging Face's EarlyStoppingCallback. Evaluations are alike on every rank, so all end at one step.

    ConfigError where the job names a metric that its task, of the metrics `known`, does not tell; the first of these is
    compared where it names none.
    """

    def __init__(self, job: Job, known: Sequence[str]) -> None:
        self._job = job
        self.name = (job.metric_for_best_model or known[0]).removeprefix("eval_")
        self.standing = Standing(rule=self.rule)
        is_task = job.lm_eval_tasks and self.name.startswith(LM_EVAL)  # rank 0 knows its tasks when it has loaded them
        if self.name not in known and not is_task:
            raise ConfigError(
                f"metric_for_best_model is {job.metric_for_best_model!r}, which the task {job.task!r} does not tell",
                f"known: {', '.join(known)}",
            )

    @property
    def rule(self) -> str:
        """What a gain is, in words."""
        return f"{'greater' if self._sign > 0 else 'smaller'} {self.name}"

    def take_up(self, standing: Standing) -> None:
        """Go on from how evaluations stood in a save or a snapshot.

        Where another metric was compared, or the other way round, its best is no best of this one, and none has waited
        for a gain of it. The last evaluation is then the best so far, if it told this metric.
        """
        if standing.rule in ("", self.rule):
            self.standing = msgspec.structs.replace(standing, rule=self.rule)
            return
        value = standing.values.get(self.name)
        step = 0 if value is None else standing.evaluated
        self.standing = Standing(value, step, 0, standing.evaluated, standing.values, self.rule)

    @property
    def reason(self) -> str:
        """Why the run ends early; "" while it goes on."""
        patience, now = self._job.early_stopping_patience, self.standing
        if not patience or now.waited < patience:
            return ""
        best = "never a number" if now.best is None else f"at its best {now.best:.6g}, after step {now.step}"
        return f"{counted(now.waited, 'evaluation')} without a gain: {self.name} was {best}"

    def add(self, step: int, evaluated: Evaluated) -> None:
        """An evaluation after `step`. A gain above the threshold ends the waiting; a smaller one is the best too."""
        value, before = evaluated.told.get(self.name, math.nan), self.standing
        values = {name: number for name, number in evaluated.told.items() if math.isfinite(number)}
        gain = math.inf if before.best is None else self._sign * (value - before.best)
        if math.isnan(value) or gain <= 0:
            self.standing = Standing(before.best, before.step, before.waited + 1, step, values, self.rule)
        else:
            waited = 0 if gain > self._job.early_stopping_threshold else before.waited + 1
            self.standing = Standing(value, step, waited, step, values, self.rule)

    def worth(self, step: int, facts: Mapping[str, Any]) -> float | None:
        """How good a save is by what it keeps (`Retention`); None unless there was an evaluation after its step."""
        value = self.value(step, facts)
        return None if value is None else self._sign * value

    def value(self, step: int, facts: Mapping[str, Any]) -> float | None:
        """What `metric_for_best_model` was after the step of a save; None unless there was an evaluation."""
        standing = msgspec.convert(facts.get(FACT, {}), Standing)
        return standing.values.get(self.name) if standing.evaluated == step else None

    def choice(self, step: int, facts: Mapping[str, Any]) -> str:
        """Why the finished model is that of a save; "" unless the job asks for the best."""
        if not self._job.load_best_model_at_end:
            return ""
        value, now = self.value(step, facts), self.standing
        if value is None:
            return "the last, as no save that was evaluated is whole"
        said = f"{self.name} {value:.6g}, the best of the saves"
        if now.best is not None and self._sign * (now.best - value) > 0:
            said += f"; {now.best:.6g} after step {now.step} has no save"
        return said

    @property
    def _sign(self) -> int:
        greater = self._job.greater_is_better
        if greater is None:
            greater = not any(part.endswith(LESS_IS_BETTER) for part in self.name.split("/"))
        return 1 if greater else -1
