"""`RemoteRollouts`: `Rollouts` of servers on other machines, which get the weights from the trainer (`tllm rollout`).

Rank 0 asks them, as it asks teachers. The seed of a completion is the run's own, so the completions are the same
whichever server samples which of them, and however many servers there are. A lost server's prompts go to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path

from torch import Tensor

from tllm.cluster.tls import data_client
from tllm.text.same_vocabulary import vocabulary_digest
from tllm.training.job.initial_model import InitialModel
from tllm.training.job.job import Job, encode_job
from tllm.training.job.job_parts import sampling_facts
from tllm.training.job.key_limits import address_of
from tllm.training.job.rollout_keys import RolloutConfig
from tllm.training.policy.rollouts import Completion, CompletionSampling, PromptGroup, RolloutOrder
from tllm.training.questions.answerer_pool import AnswererPool, NamedAnswerers
from tllm.training.questions.question_queue import Asked, QuestionQueue
from tllm.training.questions.shared_secret import shared_identity
from tllm.training.questions.waiting_ranks import Still, WaitingRanks, nobody
from tllm.training.rollout_servers.base_digest import base_digest
from tllm.training.rollout_servers.gathered_weights import GatheredWeights
from tllm.training.rollout_servers.published_weights import PublishedWeights, WeightVersion
from tllm.training.rollout_servers.rollout_inquirer import RolloutInquirer, portions
from tllm.training.rollout_servers.rollout_messages import PromptGroups, RolloutAnswer, RolloutQuestion, RolloutRun
from tllm.training.step.rank_groups import RankConfig
from tllm.training.step.rank_model import RankModel

METRICS = (
    *("rollout/weight_bytes", "rollout/changed_weight_ratio", "rollout/completion_bytes"),
    *("rollout/questions_asked_again", "rollout/server_seconds"),
)


class RemoteRollouts:
    """A rank's part: those of the first replica bring their weights together, and rank 0 asks the servers.

    `initial_model` is rank 0's. `metrics` are of the last call of `sample` and, where it went on, of those before it.
    """

    def __init__(self, config: RankConfig, model: RankModel, initial_model: InitialModel | None) -> None:
        self._is_first = config.plan.coordinates(config.rank).replica == 0
        self._gathered = GatheredWeights(config.groups.replica, model.trained) if self._is_first else None
        self._servers: RolloutServers | None = None
        self._ranks = WaitingRanks(config.groups.data)
        self.metrics: dict[str, float] = {}
        if initial_model is not None:
            assert self._gathered is not None, "rank 0 is of the first replica"
            weights = PublishedWeights(self._gathered.room)
            self._servers = RolloutServers(config, initial_model, weights)

    def share(self, order: RolloutOrder) -> Sequence[PromptGroup]:
        """All, on the ranks of the first replica."""
        return groups_of(order) if self._is_first else []

    def publish(self) -> None:
        """What is asked for from now on is sampled with the weights as they are. Every rank calls it."""
        if self._gathered is None:
            return
        if self._servers is None:
            self._gathered.gather({})
        else:
            self._servers.publish(self._gathered.gather)

    def ask(
        self, groups: Sequence[PromptGroup], stop_ids: Sequence[int], sampling: CompletionSampling
    ) -> AskedCompletions:
        """On rank 0: let servers complete these with the weights that were published last."""
        assert self._servers is not None, "rank 0 asks"
        return self._servers.published.ask(groups, stop_ids, sampling)

    def fixed(self) -> FixedWeights:
        """On rank 0: what samples with the weights that were published last, whatever is published later."""
        assert self._servers is not None, "rank 0 asks"
        return self._servers.fixed()

    def sample(
        self, groups: Sequence[PromptGroup], stop_ids: Sequence[int], sampling: CompletionSampling
    ) -> list[Completion]:
        """ConfigError where the servers cannot sample these."""
        if not sampling.goes_on:
            self.publish()
        if self._servers is None:
            self._ranks.meet()
            return []
        asked = self.ask(groups, stop_ids, sampling)
        try:
            found = asked.wait(self._ranks.still)
        finally:
            self._ranks.meet()
        before = self.metrics if sampling.goes_on else {}
        self.metrics = {name: value + before.get(name, 0.0) for name, value in asked.metrics.items()}
        return found

    def close(self) -> None:
        if self._servers is not None:
            self._servers.close()


class RolloutServers:
    """Rank 0's: the servers, and the questions that they take in turn."""

    def __init__(self, rank_config: RankConfig, initial_model: InitialModel, weights: PublishedWeights) -> None:
        job, cluster = rank_config.job, rank_config.answerers
        config, spec, facts = job.rollouts, initial_model.spec, sampling_facts(job)
        assert config is not None and facts is not None, "checked when the run began"
        self.weights, self._at_once = weights, facts.at_once
        self._published: FixedWeights | None = None
        self._queue = QuestionQueue[RolloutQuestion, RolloutAnswer]("rollout server", rank_config.stop)
        inquirer = RolloutInquirer(_introduction(job, initial_model), weights, spec.vocab_size, spec.eos_token_ids)
        self._numbers = count(1)
        self.pool: AnswererPool[RolloutRun, RolloutQuestion, RolloutAnswer]
        if config.rollout_nodes:
            assert cluster is not None, "checked when the run began"
            self.pool = AnswererPool.of("rollout", cluster, inquirer, self._queue)
        else:
            addresses, context = named_servers(config, job.task)
            self.pool = AnswererPool.at(addresses, inquirer, self._queue, context)

    def publish(self, gather: Callable[[Mapping[str, Tensor]], None]) -> None:
        """The weights are those that `gather` writes into the tensors that it is given."""
        if self._published is not None:
            self._published.release()
        version = self.weights.unused()
        gather(version.tensors)
        version = self.weights.publish(version)
        self._published = FixedWeights(self, version, self.weights.changed_bytes / max(self.weights.nbytes, 1))

    @property
    def published(self) -> FixedWeights:
        """The weights that were published last."""
        assert self._published is not None, "publish comes before"
        return self._published

    def fixed(self) -> FixedWeights:
        """The same, which stay for who has them."""
        self.weights.use(self.published.version)
        return self.published

    def put(
        self, root: bytes, groups: Sequence[PromptGroup], stop_ids: Sequence[int], sampling: CompletionSampling
    ) -> list[Asked[RolloutQuestion, RolloutAnswer]]:
        """Let these wait for servers, about one question for each, to be completed with the weights of this root."""
        return [
            self._queue.ask(PromptGroups(next(self._numbers), root, portion, tuple(stop_ids), sampling))
            for portion in portions(groups, max(1, len(self.pool)), self._at_once)
        ]

    def close(self) -> None:
        """End the threads."""
        self.pool.close()


class FixedWeights:
    """Weights that were published, and stay until who has them has called `release`. Any thread may ask.

    `changed`: the part of their bytes in chunks that were others before.
    """

    def __init__(self, servers: RolloutServers, version: WeightVersion, changed: float) -> None:
        self._servers, self.version, self._changed = servers, version, changed

    def ask(
        self, groups: Sequence[PromptGroup], stop_ids: Sequence[int], sampling: CompletionSampling
    ) -> AskedCompletions:
        """Ask for the completions of each group."""
        self._servers.weights.use(self.version)
        asked = self._servers.put(self.version.root, groups, stop_ids, sampling)
        return AskedCompletions(self._servers, self.version, asked, 0.0 if sampling.goes_on else self._changed)

    def release(self) -> None:
        """They are needed no more."""
        self._servers.weights.release(self.version)


class AskedCompletions:
    """Completions that servers were asked for. `metrics` are there when these are."""

    def __init__(
        self,
        servers: RolloutServers,
        version: WeightVersion,
        asked: Sequence[Asked[RolloutQuestion, RolloutAnswer]],
        changed: float,
    ) -> None:
        self._servers, self._version, self._asked, self._changed = servers, version, asked, changed
        self.metrics: dict[str, float] = {}

    @property
    def is_over(self) -> bool:
        """Whether nobody needs to be waited for."""
        return all(one.answered.done() for one in self._asked)

    def wait(self, still: Still = nobody) -> list[Completion]:
        """The completions of each group in turn; called once. ConfigError where the servers cannot sample them."""
        found = [self._servers.pool.answer_of(one, still) for one in self._asked]
        weights = self._servers.weights
        self.metrics = {
            "rollout/weight_bytes": float(weights.bytes_travelled(self._version)),
            "rollout/changed_weight_ratio": self._changed,
            "rollout/completion_bytes": float(sum(nbytes for _, nbytes in found)),
            "rollout/questions_asked_again": float(sum(one.times_given_back for one in self._asked)),
            "rollout/server_seconds": sum(one.seconds for one in self._asked),
        }
        weights.release(self._version)
        return [completion for answer, _ in found for completion in answer.completions]


def groups_of(order: RolloutOrder) -> list[PromptGroup]:
    """All, in order, whichever replica they are dealt to."""
    return list(chain.from_iterable(order.groups))


def named_servers(config: RolloutConfig, table: str) -> NamedAnswerers:
    """The servers that a job names. ConfigError for what is no address, AuthError for a secret that is none."""
    context = data_client(shared_identity(Path(config.rollout_secret), "policy", "tllm rollout"))
    return NamedAnswerers([address_of(text, f"{table}.rollout_servers") for text in config.rollout_servers], context)


def _introduction(job: Job, initial_model: InitialModel) -> RolloutRun:
    config = (initial_model.folder / "config.json").read_text("utf-8")
    base = base_digest(initial_model.weights) if job.lora is not None and initial_model.weights is not None else ""
    return RolloutRun(encode_job(job), config, vocabulary_digest(initial_model.folder), base)
