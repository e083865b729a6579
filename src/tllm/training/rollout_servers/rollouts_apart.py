"""`RolloutsApart`: `Rollouts` of servers on other machines, which get the weights from the trainer (`tllm rollout`).

Rank 0 asks, as it asks teachers. The seed of a completion is the run's own, so that what comes back is the same set
whichever server samples what, and however many there are; a lost server's prompts go to the others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from tllm.cluster.tls import data_client
from tllm.core.errors import ConfigError, TllmError
from tllm.text.same_vocabulary import vocabulary_digest
from tllm.training.job.initial_model import InitialModel
from tllm.training.job.job import Job, encode_job
from tllm.training.job.job_parts import sampling_facts
from tllm.training.job.key_limits import address_of
from tllm.training.job.rollout_keys import RolloutConfig
from tllm.training.policy.rollouts import Completion, CompletionSampling, PromptGroup, RolloutOrder
from tllm.training.questions.answerer_pool import AnswererPool, ClusterAnswerers
from tllm.training.questions.question_queue import QuestionQueue
from tllm.training.questions.remote_answerer import NOBODY, wait_for
from tllm.training.questions.shared_secret import shared_identity
from tllm.training.rollout_servers.base_digest import base_digest
from tllm.training.rollout_servers.gathered_weights import GatheredWeights
from tllm.training.rollout_servers.published_weights import PublishedWeights
from tllm.training.rollout_servers.rollout_inquirer import RolloutInquirer, portions
from tllm.training.rollout_servers.rollout_messages import PromptGroups, RolloutAnswer, RolloutQuestion, RolloutRun
from tllm.training.step.rank_groups import RankConfig
from tllm.training.step.rank_model import RankModel

log = logging.getLogger("tllm.train")

METRICS = (
    *("rollout/weight_bytes", "rollout/changed_weight_ratio", "rollout/completion_bytes"),
    "rollout/questions_asked_again",
)


class RolloutsApart:
    """A rank's part: those of the first replica bring their weights together, and rank 0 asks the servers.

    `initial_model` is rank 0's.
    """

    def __init__(self, config: RankConfig, model: RankModel, initial_model: InitialModel | None) -> None:
        self._is_first = config.plan.coordinates(config.rank).replica == 0
        self._gathered = GatheredWeights(config.groups.replica, model.trained) if self._is_first else None
        self._servers: RolloutServers | None = None
        if initial_model is not None:
            assert self._gathered is not None, "rank 0 is of the first replica"
            weights = PublishedWeights(self._gathered.tensors)
            self._servers = RolloutServers(config.job, initial_model, weights, config.answerers)

    @property
    def metrics(self) -> dict[str, float]:
        return {} if self._servers is None else self._servers.metrics

    def share(self, order: RolloutOrder) -> Sequence[PromptGroup]:
        """All, on the ranks of the first replica."""
        return list(chain.from_iterable(order.groups)) if self._is_first else []

    def sample(
        self, groups: Sequence[PromptGroup], stop_ids: Sequence[int], sampling: CompletionSampling
    ) -> list[Completion]:
        """ConfigError where the servers cannot sample these."""
        if not groups or self._gathered is None:
            return []
        if not sampling.goes_on:
            self._gathered.gather()
        return [] if self._servers is None else self._servers.sample(groups, stop_ids, sampling)

    def close(self) -> None:
        if self._servers is not None:
            self._servers.close()


class RolloutServers:
    """Rank 0's: the servers, and the questions that they take in turn. `metrics` are of the last call
    and, where it went on, of those before it."""

    def __init__(
        self, job: Job, initial_model: InitialModel, weights: PublishedWeights, cluster: ClusterAnswerers | None = None
    ) -> None:
        config, spec, facts = job.rollouts, initial_model.spec, sampling_facts(job)
        assert config is not None and facts is not None, "checked when the run began"
        self._weights, self._at_once = weights, facts.at_once
        self._queue = QuestionQueue[RolloutQuestion, RolloutAnswer]("rollout server")
        inquirer = RolloutInquirer(_introduction(job, initial_model), weights, spec.vocab_size, spec.eos_token_ids)
        self._number = 0
        self.metrics: dict[str, float] = {}
        self._pool: AnswererPool[RolloutRun, RolloutQuestion, RolloutAnswer]
        if config.rollout_nodes:
            assert cluster is not None, "checked when the run began"
            self._pool = AnswererPool.of("rollout", cluster, inquirer, self._queue)
        else:
            context = data_client(shared_identity(Path(config.rollout_secret), "policy", "tllm rollout"))
            self._pool = AnswererPool.at(addresses_of(config, job.task), inquirer, self._queue, context)

    def sample(
        self, groups: Sequence[PromptGroup], stop_ids: Sequence[int], sampling: CompletionSampling
    ) -> list[Completion]:
        """The completions of each group in turn, with the weights as they are now, or where sampling goes on as they
        were in the call before."""
        if not sampling.goes_on:
            self._weights.publish()
            self.metrics = dict.fromkeys(METRICS, 0.0)
            self.metrics["rollout/changed_weight_ratio"] = self._weights.changed_bytes / max(self._weights.nbytes, 1)
        sent, given_back = self._weights.sent_bytes, self._queue.given_back
        asked, root = [], self._weights.root
        for portion in portions(groups, max(1, len(self._pool)), self._at_once):
            self._number += 1
            question = PromptGroups(self._number, root, portion, tuple(stop_ids), sampling)
            asked.append(self._queue.ask(question))
        try:
            found = [wait_for(one, self._pool, "the run", self.waits_for, self._tell) for one in asked]
        except TllmError as error:
            raise ConfigError(error.message, error.hint) from error
        self.metrics["rollout/weight_bytes"] += self._weights.sent_bytes - sent
        self.metrics["rollout/completion_bytes"] += sum(nbytes for _, nbytes in found)
        self.metrics["rollout/questions_asked_again"] += self._queue.given_back - given_back
        return [completion for answer, _ in found for completion in answer.completions]

    def waits_for(self) -> str:
        """The servers, with what is the matter with each."""
        each = ", ".join(f"{one.name} ({one.trouble or 'sampling'})" for one in self._pool)
        return f"completions of the rollout servers {each or NOBODY}"

    def close(self) -> None:
        """End the threads."""
        self._queue.close()
        for one in self._pool:
            one.close()

    def _tell(self, reason: str) -> None:
        if not len(self._pool) or any(one.trouble for one in self._pool):
            log.warning("waiting for %s", reason)


def addresses_of(config: RolloutConfig, table: str) -> list[tuple[str, int]]:
    """Of the servers that a job names; ConfigError for what is no address."""
    return [address_of(text, f"{table}.rollout_servers") for text in config.rollout_servers]


def _introduction(job: Job, initial_model: InitialModel) -> RolloutRun:
    config = (initial_model.folder / "config.json").read_text("utf-8")
    base = base_digest(initial_model.weights) if job.lora is not None and initial_model.weights is not None else ""
    return RolloutRun(encode_job(job), config, vocabulary_digest(initial_model.folder), base)
