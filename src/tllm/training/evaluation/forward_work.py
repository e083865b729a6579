"""The forward passes of a run beside its steps: references at its begin, estimates before steps, evaluations after."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from tllm.comm.collectives.group import solo
from tllm.parallel.mesh import whole
from tllm.spec.model_spec import ModelSpec
from tllm.training.data.batch_tensors import Tokens
from tllm.training.data.batches import Batches
from tllm.training.evaluation.best_evaluation import BestEvaluation
from tllm.training.evaluation.divergence_estimate import BeforePasses, DivergenceEstimate, unchanged
from tllm.training.evaluation.held_out import Evaluated, HeldOut, has_perplexity
from tllm.training.evaluation.reference_pass import ReferencePass, prepare_reference
from tllm.training.job.initial_model import InitialModel, run_name
from tllm.training.job.job import Job
from tllm.training.job.preference_tables import needs_reference
from tllm.training.job.rollout_keys import reward_metrics
from tllm.training.objectives.choose_objective import choose_objective
from tllm.training.objectives.kto_loss import KTOLoss
from tllm.training.objectives.objective import Objective
from tllm.training.objectives.preference_loss import PreferenceLoss
from tllm.training.questions.stop_signal import STOPPED
from tllm.training.step.rank_groups import RankConfig
from tllm.training.step.rank_model import RankModel

log = logging.getLogger("tllm.training")


class OtherEvaluation(Protocol):
    """A part of an evaluation. Every rank makes the same calls; `batches` are the rows held out, on rank 0."""

    def prepare(self, batches: Batches | None) -> None: ...

    def evaluate(self, step: int) -> Evaluated: ...


class ForwardWork:
    """Every rank makes the same calls. `initial_model` and `batches` are rank 0's, who alone reads the data.

    `others` are what evaluations ask beside the loss of rows held out: completions, tasks of lm-eval.
    """

    def __init__(
        self,
        config: RankConfig,
        model: RankModel,
        initial_model: InitialModel | None,
        batches: Batches | None,
        others: Sequence[OtherEvaluation] = (),
    ) -> None:
        self._config, self._model = config, model
        self._train = batches
        self._eval = initial_model.eval_batches(config.job) if initial_model is not None else None
        self._before: BeforePasses = unchanged
        if isinstance(model.objective, KTOLoss) and (config.job.kto is None or config.job.kto.loss_type == "kto"):
            self._before = DivergenceEstimate(model, config.groups, model.objective.log_probs)
        self._held_out: HeldOut | None = None
        self._others = others
        self.best = BestEvaluation(config.job, _comparable(config.job, model.objective))

    def prepare(self, initialize: Callable[[], None]) -> None:
        """Before the weights are restored: have the references of all rows, if the task compares with any.

        `initialize` gives the model its first weights; it is called where they are needed.
        """
        config, objective = self._config, self._model.objective
        if needs_reference(config.job.task, config.job.dpo):
            assert isinstance(objective, PreferenceLoss | KTOLoss)
            found = {"train": self._train, "eval": self._eval}
            data = {name: batches for name, batches in found.items() if batches is not None}
            reference = ReferencePass(config, self._model, objective.log_probs)
            run = run_name(config.job) if data else ""
            prepare_reference(config, reference, initialize, data or None, run)
        if config.job.eval_files and config.job.rollouts is None:
            self._held_out = HeldOut(config, self._model, self._before, self._eval)
        for other in self._others:
            other.prepare(self._eval)

    def before_passes(self, microbatches: Sequence[Tokens]) -> list[Tokens]:
        """This replica's microbatches of a step, with what must be known of all of them first."""
        return self._before(microbatches)

    def evaluate(self, step: int) -> Evaluated | None:
        """The evaluation that is due after a step, the first being 1; None where none is."""
        job = self._config.job
        if not (job.eval_files or job.lm_eval_tasks) or not is_evaluation_due(job, step):
            return None
        start = time.monotonic()
        evaluated = Evaluated() if self._held_out is None else self._held_out.evaluate()
        for other in self._others:
            if evaluated.fault is None:
                evaluated = evaluated.joined(other.evaluate(step))
        if evaluated.fault is None:
            evaluated = msgspec.structs.replace(evaluated, seconds=time.monotonic() - start)
            self.best.add(step, evaluated)
        elif evaluated.fault == STOPPED and self._config.rank == 0:
            log.warning("the evaluation after step %d was stopped and is not made again", step)
        return evaluated

    def close(self) -> None:
        """Close the files of the rows held out."""
        if self._eval is not None:
            self._eval.close()


def check_best_metric(job: Job, spec: ModelSpec) -> None:
    """ConfigError where a job compares evaluations by what they do not tell, before there are ranks that find it."""
    if job.metric_for_best_model is not None:
        BestEvaluation(job, _comparable(job, choose_objective(job, whole(spec), solo())))


def _comparable(job: Job, objective: Objective) -> tuple[str, ...]:
    """The numbers that evaluations can be compared by, the first where the job names none."""
    if job.rollouts is not None:
        return reward_metrics(job.rollouts)
    return ("loss", *(["perplexity"] if has_perplexity(job) else []), *objective.metric_names)


def is_evaluation_due(job: Job, step: int) -> bool:
    """Every `eval_steps`, and after the last step."""
    return step % job.eval_steps == 0 or step == job.max_steps
