"""`HarnessEvaluation`: runs tasks of lm-evaluation-harness within a training run, with the weights of that moment.

Rank 0 runs the harness. Each of its questions is one to all ranks: how likely continuations are (`LikelihoodPass`), or
what the model writes (`GreedyTexts`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from tllm.core.errors import ConfigError, decoded
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.batches import Batches
from tllm.training.evaluation.held_out import EVALUATIONS, Evaluated
from tllm.training.harness.greedy_texts import GreedyTexts, WantedText
from tllm.training.harness.likelihood_pass import Continuation, Likelihood, LikelihoodPass, packed_rows
from tllm.training.job.job import Job
from tllm.training.job.job_parts import LM_EVAL
from tllm.training.policy.rollouts import Rollouts
from tllm.training.step.rank_groups import RankConfig
from tllm.training.step.rank_model import RankModel
from tllm.training.tools.user_functions import said

LIKELIHOODS, TEXTS = b"likelihoods", b"texts"
HARNESS = "lm_eval"
"""Its package."""


class HarnessEvaluation:
    """Every rank makes the same calls. `folder` is where rank 0 finds the tokenizer; None on other ranks.

    `rollouts` are there where tasks may generate.
    """

    def __init__(self, config: RankConfig, model: RankModel, rollouts: Rollouts | None, folder: Path | None) -> None:
        self._config, self._folder = config, folder
        self._likelihoods = LikelihoodPass(config, model)
        can_write = rollouts is not None and config.job.lm_eval_max_gen_toks > 0
        self._texts = GreedyTexts(config, rollouts) if rollouts is not None and can_write else None
        self._best = (config.job.metric_for_best_model or "").removeprefix("eval_")
        self._tasks: Any = None
        self._model: Any = None
        self._is_asking = False

    def prepare(self, batches: Batches | None) -> None:
        """On rank 0: load the tasks. ConfigError where they cannot be had, or the harness cannot."""
        if self._folder is None:
            return
        harness, job = _harness(), self._config.job
        tokenizer = Tokenizer.from_folder(self._folder)
        if tokenizer is None or not tokenizer.eos_ids:
            raise ConfigError(
                f"{self._folder} has no tokenizer that names a token which ends a text, and lm_eval_tasks needs one",
                "give the model's folder a tokenizer, or leave lm_eval_tasks out",
            )
        template = ChatTemplate.from_folder(self._folder, tokenizer)
        self._tasks = harness.HarnessTasks(job, template is not None)
        if self._best.startswith(LM_EVAL) and self._best.split("/")[1] not in job.lm_eval_tasks + self._tasks.names:
            raise ConfigError(
                f"metric_for_best_model is {self._best!r}, and that is no task of lm_eval_tasks",
                f"known: {', '.join(self._tasks.names)}",
            )

        def texts(wanted: Sequence[WantedText]) -> list[str]:
            assert self._texts is not None and tokenizer is not None, "tasks have been checked"
            with self._asking(TEXTS):
                return self._texts.of(wanted, tokenizer)

        answers = harness.Answers(self._asked, None if self._texts is None else texts)
        self._model = harness.HarnessModel(tokenizer, template, job.seq_len, answers)

    def evaluate(self, step: int) -> Evaluated:
        """With the weights that the model has now; metrics are alike on every rank."""
        world = self._config.groups.world
        if self._folder is None:
            while (question := world.broadcast_bytes(None)) in (LIKELIHOODS, TEXTS):
                self._follow(question)
            evaluated = decoded(question, EVALUATIONS)
        else:
            try:
                evaluated = Evaluated(metrics=self._with_best(self._tasks.run(self._model)))
            except ConfigError as error:
                evaluated = Evaluated(fault=(error.message, error.hint))
            except Exception as error:  # of the tasks' own files
                if self._is_asking:  # all ranks are in the midst of something
                    raise
                fault = f"a task of lm-eval raised {said(error)}", "look at the tasks' own files"
                evaluated = Evaluated(fault=fault)
            world.broadcast_bytes(msgspec.msgpack.encode(evaluated))
        return evaluated

    def _with_best(self, metrics: dict[str, float]) -> dict[str, float]:
        """The same; ConfigError where the metric that evaluations are compared by is not among them."""
        if self._best.startswith(LM_EVAL) and self._best not in metrics:
            raise ConfigError(
                f"metric_for_best_model is {self._best!r}, which the tasks do not tell", f"known: {', '.join(metrics)}"
            )
        return metrics

    def _asked(self, continuations: Sequence[Continuation]) -> list[Likelihood]:
        rows = packed_rows(continuations, self._config.job.seq_len)
        with self._asking(LIKELIHOODS):
            return self._likelihoods.of(rows)

    @contextmanager
    def _asking(self, question: bytes) -> Iterator[None]:
        """Let all ranks answer a question together. Where that fails, they stay in the midst of it."""
        self._is_asking = True
        self._config.groups.world.broadcast_bytes(question)
        yield
        self._is_asking = False

    def _follow(self, question: bytes) -> None:
        if question == LIKELIHOODS:
            self._likelihoods.follow()
            return
        assert self._texts is not None, "alike on every rank"
        self._texts.follow()


def check_installed(job: Job) -> None:
    """ConfigError where a job asks for lm-evaluation-harness, which is an extra, and it is not there."""
    if job.lm_eval_tasks and find_spec(HARNESS) is None:
        raise _not_installed(HARNESS)


def _harness() -> Any:
    """The module that imports lm-eval."""
    try:
        return importlib.import_module("tllm.training.harness.harness_model")
    except ImportError as error:
        raise _not_installed(error.name) from error


def _not_installed(name: str | None) -> ConfigError:
    return ConfigError(
        f"lm_eval_tasks needs lm-evaluation-harness, and {name} is not installed",
        'pip install "together-llm[eval]", or leave lm_eval_tasks out',
    )
