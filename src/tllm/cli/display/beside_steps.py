"""`BesideSteps`: what a run computes beside its steps, and for how long: a reference before the first, evaluations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tllm.planner.simulate.forward_passes import Predict, forward_seconds
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.job.initial_model import RowsRead, rows_held_out, rows_learned
from tllm.training.job.job import Job
from tllm.training.job.job_parts import shares_prompts, training_facts
from tllm.training.job.preference_tables import needs_reference


@dataclass(frozen=True)
class BesideSteps:
    """Of a job, whose data was read once for it (`of`): the rows whose `reference` is computed, if the task has one,
    and those `held_out`; None where nobody knows.

    Plans are asked of with the rows of a microbatch, what predicts a step, and the device that ranks compute on.
    """

    job: Job
    spec: ModelSpec
    reference: RowsRead | None
    held_out: RowsRead | None

    @classmethod
    def of(cls, job: Job, spec: ModelSpec) -> BesideSteps:
        learned = rows_learned(job) if needs_reference(job.task, job.dpo) else None
        return cls(job, spec, learned, rows_held_out(job))

    def lines(self, plan: Plan, microbatch_size: int, predict: Predict, device: str = "cpu") -> list[str]:
        """What to print of it."""
        job, held_out, told = self.job, self.held_out, list[str]()
        once = 0.0 if held_out is None else self._seconds(held_out, plan, microbatch_size, predict, device)
        if self.reference is not None:
            seconds = once + self._seconds(self.reference, plan, microbatch_size, predict, device)
            told.append(f"before the first step: the reference's forward pass, {seconds:.3g} s at most")
        if held_out is not None:
            count = math.ceil(job.max_steps / job.eval_steps)
            all_of_them = f"; {count} of them take {count * once:.3g} s" if count > 1 else ""
            rows = "1 row" if held_out.documents == 1 else f"{held_out.documents} rows"
            told.append(f"an evaluation: {once:.3g} s for {rows} of eval_files{all_of_them}")
        if unknown := self._not_predicted():
            told.append(f"evaluations are longer by {' and '.join(unknown)}, which are not predicted")
        return told

    def evaluation(self, plan: Plan, microbatch_size: int, predict: Predict, device: str = "cpu") -> float | None:
        """Seconds of an evaluation; None where there is none, or a part of it is not predicted."""
        if self.held_out is None or self._not_predicted():
            return None
        return self._seconds(self.held_out, plan, microbatch_size, predict, device)

    def _not_predicted(self) -> list[str]:
        job = self.job
        parts = {
            "rows of eval_files": bool(job.eval_files) and self.held_out is None,
            "completions to be read": job.eval_num_prompts > 0,
            "tasks of lm-eval": bool(job.lm_eval_tasks),
        }
        return [name for name, is_there in parts.items() if is_there]

    def _seconds(self, rows: RowsRead, plan: Plan, microbatch_size: int, predict: Predict, device: str) -> float:
        """Of rows that go through the model once. Every replica computes as many microbatches, all of them full."""
        at_once = microbatch_size * plan.replicas
        size = math.ceil(rows.rows / at_once) * at_once
        job = replace(self.job, global_batch_size=size, microbatch_size=microbatch_size)
        facts = training_facts(job, shares_prompts=shares_prompts(job, self.spec, device), lengths=rows.lengths)
        return forward_seconds(plan, facts, predict)
