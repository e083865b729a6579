"""`BesideSteps`: what a run computes beside its steps, and for how long: a reference before the first, evaluations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from tllm.core.errors import counted
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.cost.serving_load import SamplingFacts
from tllm.planner.simulate.forward_passes import Predict, forward_seconds
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.training.data.packing import RowLengths
from tllm.training.job.initial_model import RowsRead, prompts_held_out, rows_held_out, rows_learned
from tllm.training.job.job import Job
from tllm.training.job.job_parts import role_nodes, sampling_facts, shares_prompts, training_facts
from tllm.training.job.preference_tables import needs_reference
from tllm.training.job.rollout_keys import completions_evaluated


class PredictedPlan(NamedTuple):
    """A plan, the `facts` of a job's steps, what predicts one, and the device that ranks compute on."""

    plan: Plan
    facts: TrainingFacts
    predict: Predict
    device: str = "cpu"


@dataclass(frozen=True)
class BesideSteps:
    """Of a job, whose data was read once for it (`of`): the rows whose `reference` is computed, if the task has one,
    the rows and the prompts held out; None where nobody knows."""

    job: Job
    spec: ModelSpec
    reference: RowsRead | None
    held_out: RowsRead | None
    prompts: int | None

    @classmethod
    def of(cls, job: Job, spec: ModelSpec, lengths: RowLengths | None) -> BesideSteps:
        """`lengths` are those of the rows that are learned (`row_lengths`)."""
        learned = rows_learned(job, lengths) if needs_reference(job.task, job.dpo) else None
        return cls(job, spec, learned, rows_held_out(job), prompts_held_out(job))

    def lines(self, asked: PredictedPlan) -> list[str]:
        """What to print of it."""
        parts, told = self._parts(asked), list[str]()
        known = {name: seconds for name, seconds in parts.items() if seconds is not None}
        if self.reference is not None:
            rows = [one for one in (self.held_out, self.reference) if one is not None]
            seconds = sum(self._seconds(one, asked) for one in rows)
            told.append(f"before the first step: the reference's forward pass, {seconds:.3g} s at most")
        if known:
            once, count = sum(known.values()), math.ceil(self.job.max_steps / self.job.eval_steps)
            all_of_them = f"; {count} of them take {count * once:.3g} s" if count > 1 else ""
            told.append(f"an evaluation: {once:.3g} s for {' and '.join(known)}{all_of_them}")
        if unknown := [name for name in parts if name not in known]:
            told.append(f"evaluations are longer by {' and '.join(unknown)}, which are not predicted")
        return told

    def evaluation(self, asked: PredictedPlan) -> float | None:
        """Seconds of an evaluation; None where there is none, or a part of it is not predicted."""
        parts = list(self._parts(asked).values())
        known = [seconds for seconds in parts if seconds is not None]
        return sum(known) if parts and len(known) == len(parts) else None

    def _parts(self, asked: PredictedPlan) -> dict[str, float | None]:
        """Seconds of what an evaluation computes, by what it is; None of what is not predicted."""
        job, found = self.job, dict[str, float | None]()
        if job.eval_files and job.rollouts is None:
            rows = self.held_out
            name = f"{'rows' if rows is None else counted(rows.documents, 'row')} of eval_files"
            found[name] = None if rows is None else self._seconds(rows, asked)
        if job.eval_num_prompts:
            found["completions to be read"] = self._completed(asked, self._to_be_read(), 1)
        elif job.eval_files and job.rollouts is not None:
            each = completions_evaluated(job.rollouts)
            groups = min(max(1, job.global_batch_size // each), self.prompts or 1)
            sampling = asked.facts.sampling
            sampling = sampling and replace(sampling, groups=groups, num_generations=each, ahead=0)
            prompts = "prompts" if self.prompts is None else counted(self.prompts, "prompt")
            name = f"{counted(each, 'completion')} of each of {prompts} of eval_files"
            found[name] = self._completed(asked, sampling, (self.prompts or 0) / groups)
        if job.lm_eval_tasks:
            found["tasks of lm-eval"] = None
        return found

    def _seconds(self, rows: RowsRead, asked: PredictedPlan) -> float:
        """Of rows that go through the model once. Every replica computes as many microbatches, all of them full."""
        plan, microbatch_size = asked.plan, asked.facts.microbatch_size
        at_once = microbatch_size * plan.replicas
        size = math.ceil(rows.rows / at_once) * at_once
        job = replace(self.job, global_batch_size=size, microbatch_size=microbatch_size)
        facts = training_facts(job, shares_prompts=shares_prompts(job, self.spec, asked.device), lengths=rows.lengths)
        return forward_seconds(plan, facts, asked.predict)

    def _to_be_read(self) -> SamplingFacts | None:
        """The completions of rows held out that an evaluation writes, as long as they may be."""
        sampling = sampling_facts(replace(self.job, lm_eval_max_gen_toks=0))
        if sampling is None or self.held_out is None or self.held_out.lengths is None:
            return sampling
        lengths = self.held_out.lengths
        prompt = lengths.prompt if lengths.prompt > 1 else lengths.document / 2  # of a text its first half
        return replace(sampling, prompt=max(1, min(sampling.prompt, round(prompt))))

    def _completed(self, asked: PredictedPlan, sampling: SamplingFacts | None, times: float) -> float | None:
        """Of what is sampled so many times, and of the scores that a reward model gives. None where machines beside
        those of the plan have a part in it, or nobody measured one."""
        facts, job = asked.facts, self.job
        if sampling is None or not times or role_nodes(job):
            return None
        completions = sampling.groups * sampling.num_generations
        reward = facts.reward and replace(facts.reward, tokens=completions * facts.reward.row)
        sampled = replace(facts, sampling=replace(sampling, share=1.0), reward=reward, reference=False, teacher=None)
        roles = dict(asked.predict(asked.plan, sampled).roles)
        is_known = roles.keys() >= {"sampling", *(["rewards"] if reward is not None else [])}
        return times * sum(roles.values()) if is_known else None
