"""`HarnessModel`: the model that is trained, behind the interface of lm-evaluation-harness. Only this module imports
that package.

Requests are turned into tokens as its model `hf` does it, with the run's tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tllm.core.errors import ConfigError
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer
from tllm.training.harness.greedy_texts import WantedText
from tllm.training.harness.likelihood_pass import Continuation, Likelihood
from tllm.training.job.job import Job
from tllm.training.job.job_parts import LM_EVAL
from tllm.training.tools.user_functions import said

FEWSHOT_SEED = 1234
"""The harness's own: examples are the same at every evaluation."""
GENERATED = 256
"""Tokens that a task may generate which does not say how many, as in the harness."""


class Answers(NamedTuple):
    """What the run finds out for the harness. `texts` is None where no engine is kept."""

    likelihoods: Callable[[Sequence[Continuation]], list[Likelihood]]
    texts: Callable[[Sequence[WantedText]], list[str]] | None


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """`max_length`: tokens of a row."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, max_length: int, answers: Answers) -> None:
        super().__init__()
        self._tokenizer, self._template, self._answers = tokenizer, template, answers
        self.max_length = max_length

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        bos = self._tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """With the tokens that the model expects around a text, unless they are there already."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._tokenizer.decode([self.prefix_token_id]))
        return self._tokenizer.encode(string, add_special_tokens=add_special_tokens)

    @property
    def tokenizer_name(self) -> str:
        """Of questions that are kept in a cache, which none are."""
        return "tllm"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return "" if self._template is None else self._template.source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        assert self._template is not None, "checked before the first step"
        return self._template.render(chat_history, add_generation_prompt=add_generation_prompt)

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        asked = [Continuation(context, ids) for _, context, ids in requests]
        return [(one.log_prob, one.is_greedy) for one in self._answers.likelihoods(asked)]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows: each token once, after as many as there is room for."""
        windows = [list(self._windows(request.args[0])) for request in requests]
        found = iter(self._answers.likelihoods([window for each in windows for window in each]))
        return [sum(next(found).log_prob for _ in each) for each in windows]

    def _windows(self, text: str) -> Iterator[Continuation]:
        pairs = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
        yield from (Continuation(*make_disjoint_window(pair)) for pair in pairs)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        assert self._answers.texts is not None, "checked before the first step"
        return self._answers.texts([self._wanted(*request.args) for request in requests])

    def _wanted(self, context: str, settings: dict[str, Any]) -> WantedText:
        until = settings.get("until") or ()
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        longest = generated_tokens(settings)
        return WantedText(self.tok_encode(context)[-(self.max_length - longest) :], stops, longest)


def generated_tokens(settings: dict[str, Any] | None) -> int:
    """The most tokens of a text that a task wants, by its generation settings."""
    settings = settings or {}
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    return int(next((settings[name] for name in names if settings.get(name)), GENERATED))


class HarnessTasks:
    """The tasks of a job. ConfigError, in one line, for those that cannot be had, or that this run cannot answer."""

    def __init__(self, job: Job, has_template: bool) -> None:
        self._job = job
        try:
            self._loaded = TaskManager(include_path=job.lm_eval_include_path).load(list(job.lm_eval_tasks))
        except Exception as error:  # files of the user's own are run
            raise ConfigError(
                f"the tasks {', '.join(job.lm_eval_tasks)} cannot be loaded: {said(error)}",
                "lm-eval ls tasks lists those that are known; their data is fetched once, or lies in files that "
                "lm_eval_include_path describes",
            ) from error
        for name, task in self._loaded["tasks"].items():
            self._check(name, task)
            self._set_examples(task)
        if job.lm_eval_apply_chat_template and not has_template:
            raise ConfigError("lm_eval_apply_chat_template is true and the model has no chat template", "leave it out")
        self.names = (*self._loaded["tasks"], *self._loaded["groups"])

    def run(self, model: HarnessModel) -> dict[str, float]:
        """Every metric of every task and group, by `lm_eval/TASK/METRIC`."""
        job = self._job
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        found = evaluate(
            lm=model,
            task_dict=self._loaded,
            limit=job.lm_eval_limit or None,
            apply_chat_template=job.lm_eval_apply_chat_template,
            fewshot_as_multiturn=job.lm_eval_apply_chat_template,
            bootstrap_iters=0,
            log_samples=False,
        )
        return dict(metrics_of(found["results"]))

    def _set_examples(self, task: Any) -> None:
        """As the harness does: a task that has set their number to 0 is not given any."""
        own, wanted = task.get_config("num_fewshot"), self._job.lm_eval_num_fewshot
        if own != 0:
            task.set_config(key="num_fewshot", value=(own or 0) if wanted is None else wanted)

    def _check(self, name: str, task: Any) -> None:
        if getattr(task, "MULTIMODAL", False):
            raise ConfigError(f"the task {name} has pictures, which this run cannot read", "leave it out")
        if getattr(task, "UNSAFE_CODE", False):
            raise ConfigError(f"the task {name} runs code that the model writes", "leave it out of lm_eval_tasks")
        if task.OUTPUT_TYPE != "generate_until":
            return
        settings = task.config.generation_kwargs or {}
        longest, room = generated_tokens(settings), self._job.lm_eval_max_gen_toks
        if longest > room:
            raise ConfigError(
                f"the task {name} generates up to {longest} tokens and lm_eval_max_gen_toks is {room}",
                f"give lm_eval_max_gen_toks = {longest}, or leave the task out",
            )
        if settings.get("do_sample"):
            raise ConfigError(f"the task {name} samples and evaluations of a run are greedy", "leave it out")


def metrics_of(results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Numbers of the harness's results, whose names are METRIC,FILTER; without standard errors."""
    for task, values in results.items():
        for name, value in values.items():
            metric, comma, chosen = name.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                yield f"{LM_EVAL}{task}/{metric}" + ("" if chosen == "none" else f"/{chosen}"), float(value)
