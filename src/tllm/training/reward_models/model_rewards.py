"""`ModelRewards`: the scores that a reward model gives to completions, beside the trainer or on nodes of the run's
cluster.

As in TRL, it scores prompt and completion as its own tokenizer encodes them, without tokens that this would add by
itself. Prompts that are messages go through its own chat template.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tllm.core.errors import ClusterError, ConfigError, RequestError
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer
from tllm.training.job.rollout_keys import RolloutConfig
from tllm.training.questions.answerer_pool import AnswererPool, ClusterAnswerers
from tllm.training.questions.answering_model import AnsweringModel
from tllm.training.questions.question_queue import QuestionQueue
from tllm.training.questions.run_connection import RunConnection
from tllm.training.questions.stop_signal import StopSignal
from tllm.training.questions.waiting_ranks import Still, nobody
from tllm.training.reward_models.reward_messages import SCORING, ScoringRun, TextScore, TextToScore
from tllm.training.reward_models.reward_model import RewardModel

IN_FLIGHT = 4
"""Texts that a node has been asked and has not answered: it computes one while others travel."""

RewardConnection = RunConnection[ScoringRun, TextToScore, TextScore]


class Scorer(Protocol):
    """Says what texts are worth, in their order."""

    def scores(self, texts: Sequence[TextToScore]) -> list[float]:
        """ConfigError where that cannot be done."""

    def close(self) -> None: ...


class ModelRewards:
    """Rank 0's: called as reward functions are. `name` is the model's folder's."""

    file: Path | None = None

    def __init__(self, model: AnsweringModel, name: str, scorer: Scorer) -> None:
        tokenizer = Tokenizer.from_folder(model.folder)
        if tokenizer is None:
            raise ConfigError(
                f"the reward model {model.folder} has no tokenizer", "it reads texts: copy its tokenizer.json there"
            )
        self.name, self._scorer, self._tokenizer = name, scorer, tokenizer
        self._template = ChatTemplate.from_folder(model.folder, tokenizer)
        self._longest = model.spec.max_model_len

    @classmethod
    def open(
        cls,
        config: RolloutConfig,
        cluster: ClusterAnswerers | None,
        stop: StopSignal,
        deterministic: bool,
        still: Still = nobody,
    ) -> ModelRewards | None:
        """The one that a job names, if it does; who waits for nodes calls `still`. ConfigError for a model that scores
        nothing."""
        if (name := config.reward_model_name_or_path) is None:
            return None
        model = AnsweringModel.find_scoring(name)
        scorer: Scorer
        if config.reward_nodes:
            assert cluster is not None, "checked when the run began"
            scorer = NodesThatScore(ScoringRun(model.spec.vocab_size, deterministic), cluster, stop, still)
        else:
            scorer = ScorerHere(RewardModel.open(name, model, config.reward_dtype), deterministic)
        return cls(model, config.reward_model, scorer)

    def __call__(self, arguments: Mapping[str, Sequence[Any]]) -> list[float]:
        """The score of each completion. ConfigError where nobody can give it."""
        pairs = zip(arguments["prompts"], arguments["completions"], strict=True)
        ids = [self._ids(prompt, completion) for prompt, completion in pairs]
        return self._scorer.scores([TextToScore(number, one) for number, one in enumerate(ids)])

    def close(self) -> None:
        self._scorer.close()

    def _ids(self, prompt: Any, completion: Any) -> bytes:
        if isinstance(prompt, str):
            text = prompt + completion
        elif self._template is None:
            raise ConfigError(
                f"prompts are messages and the reward model {self.name} has no chat template", "give it one"
            )
        else:
            try:
                text = self._template.render([*prompt, *completion], add_generation_prompt=False)
            except RequestError as error:
                raise ConfigError(f"{error.message}, in the chat template of the reward model", error.hint) from error
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if not 0 < len(ids) <= self._longest:
            raise ConfigError(
                f"a prompt with its completion has {len(ids)} tokens of the reward model {self.name}, whose context "
                f"is {self._longest}",
                "lower max_completion_length, or take a reward model with a longer context",
            )
        return np.array(ids, dtype="<i4").tobytes()


@dataclass(frozen=True)
class ScorerHere:
    """A `Scorer` in this process."""

    model: RewardModel
    deterministic: bool

    def scores(self, texts: Sequence[TextToScore]) -> list[float]:
        found = [self.model.answer(text, self.deterministic) for text in texts]
        if faults := [one.error for one in found if one.error]:
            raise ConfigError(faults[0], "its weights are not those of a model that was trained: take another one")
        return [one.score for one in found]

    def close(self) -> None:
        """Nothing waits."""


@dataclass(frozen=True)
class RewardInquirer:
    """What a run says to each node that scores."""

    introduction: ScoringRun
    conversation = SCORING
    in_flight = IN_FLIGHT

    def send(self, connection: RewardConnection, question: TextToScore, name: str) -> int:
        return connection.send_question(question)

    def checked(self, answer: TextScore, question: TextToScore, name: str) -> TextScore:
        if answer.error or answer.number != question.number or not math.isfinite(answer.score):
            what = answer.error or f"text {question.number} is answered by {answer.score} for text {answer.number}"
            raise ClusterError(f"the reward model at {name} cannot score: {what}")
        return answer

    def refused(self, model: str, name: str, reason: str) -> ConfigError:
        return ConfigError(f"the reward model {model} at {name} cannot score for this run: {reason}")


class NodesThatScore:
    """A `Scorer` of nodes of the cluster, whoever has the role at the time: what one was asked that is lost, others are
    asked."""

    def __init__(self, run: ScoringRun, cluster: ClusterAnswerers, stop: StopSignal, still: Still) -> None:
        self._still = still
        self._queue = QuestionQueue[TextToScore, TextScore]("reward model", stop)
        self._pool = AnswererPool.of("reward", cluster, RewardInquirer(run), self._queue)

    def scores(self, texts: Sequence[TextToScore]) -> list[float]:
        asked = [self._queue.ask(text) for text in texts]
        return [self._pool.answer_of(one, self._still)[0].score for one in asked]

    def close(self) -> None:
        """End the threads."""
        self._pool.close()
