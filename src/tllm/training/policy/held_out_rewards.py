"""`HeldOutRewards`: the rewards of completions of held-out prompts, from which nothing is learned.

They are sampled as those of steps are, at the job's temperature. Each has a seed of its own, the same at every
evaluation, so that only the model changes between evaluations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from tllm.core.errors import ConfigError, decoded
from tllm.training.data.batches import Batches
from tllm.training.data.prompt_batches import PromptBatches, PromptRow
from tllm.training.data.seeds import key_for
from tllm.training.evaluation.completion_record import CompletionRecord
from tllm.training.evaluation.held_out import EVALUATIONS, Evaluated
from tllm.training.job.rollout_keys import completions_evaluated
from tllm.training.policy.advantages import Rewards
from tllm.training.policy.completion_rewards import CompletionRewards, Written
from tllm.training.policy.rollouts import Completion, RolloutOrder
from tllm.training.policy.sample_together import CompletionSampler, dealt
from tllm.training.policy.started_prompts import StartedPrompts, start_prompts
from tllm.training.questions.waiting_ranks import WaitingRanks
from tllm.training.step.rank_groups import RankConfig


class RewardedPrompts(NamedTuple):
    """Prompts whose completions were sampled together, and what each function says of these, [N, F]."""

    started: StartedPrompts
    completions: Sequence[Completion]
    texts: Sequence[Written]
    rewards_NF: Rewards


class HeldOutRewards:
    """Every rank makes the same calls. `prompts` and `rewards` are rank 0's, who alone reads prompts and calls code."""

    def __init__(
        self,
        config: RankConfig,
        sampler: CompletionSampler,
        prompts: PromptBatches | None,
        rewards: CompletionRewards | None,
    ) -> None:
        self._config, self._sampler, self._rewards, self._source = config, sampler, rewards, prompts
        assert config.job.rollouts is not None, "checked when the run began"
        self._size = completions_evaluated(config.job.rollouts)
        self._chunks: list[list[PromptRow]] = []
        self._started = StartedPrompts()

    def prepare(self, batches: Batches | None) -> None:
        """Read the prompts, on rank 0: ConfigError, with the line, for one that cannot be completed."""
        if self._source is None:
            return
        number = 0
        while rows := self._source.prompts(number):
            self._chunks.append(rows)
            number += 1
        self._source.close()

    def evaluate(self, step: int) -> Evaluated:
        """With the weights that the model has now; a reward that goes wrong is its fault, on every rank."""
        world, waiting = self._config.groups.world, WaitingRanks(self._config.groups.data)
        found: list[RewardedPrompts] = []
        evaluated, number = Evaluated(), 0
        while True:
            order = None if self._rewards is None else self._order(number, evaluated.fault)
            asked, completions = self._sampler(order)
            if asked.fault is not None:
                evaluated = Evaluated(fault=asked.fault)
            if not any(asked.groups):
                break
            if self._rewards is not None:
                try:
                    found.append(self._rewarded(completions))
                except ConfigError as error:
                    evaluated = Evaluated(fault=(error.message, error.hint))
            waiting.meet()
            number += 1
        if found and evaluated.fault is None:
            evaluated = Evaluated(metrics=self._metrics(found))
        told = None if self._rewards is None else msgspec.msgpack.encode(evaluated)
        evaluated = decoded(world.broadcast_bytes(told), EVALUATIONS)
        records = () if evaluated.fault is not None else self._records(step, found)
        return msgspec.structs.replace(evaluated, completions=records)

    def _order(self, number: int, fault: tuple[str, str] | None) -> RolloutOrder:
        """On rank 0: the prompts of a chunk; none at the end, or after a fault."""
        assert self._rewards is not None and self._source is not None
        rows = self._chunks[number] if fault is None and number < len(self._chunks) else []
        first = sum(len(chunk) for chunk in self._chunks[:number])
        seeds = [self._seeds(place) for place in range(first, first + len(rows))]
        try:
            self._started = start_prompts(rows, seeds, self._source, self._rewards.environments)
        except ConfigError as error:
            return RolloutOrder.failed(error)
        return dealt(self._started.groups, self._rewards.stop_ids, self._config.plan)

    def _seeds(self, place: int) -> tuple[int, ...]:
        seed = self._config.job.seed
        return tuple(key_for("held out", seed, place, number) >> 1 for number in range(self._size))

    def _rewarded(self, completions: Sequence[Completion]) -> RewardedPrompts:
        assert self._rewards is not None
        started, texts = self._started, self._rewards.texts(completions)
        return RewardedPrompts(started, completions, texts, self._rewards.of(started, completions, texts))

    def _metrics(self, found: Sequence[RewardedPrompts]) -> dict[str, float]:
        assert self._rewards is not None
        rewards_NF = np.concatenate([one.rewards_NF for one in found])
        completions = [completion for one in found for completion in one.completions]
        return self._rewards.metrics(completions, rewards_NF, self._rewards.together(rewards_NF, self._size))

    def _records(self, step: int, found: Sequence[RewardedPrompts]) -> tuple[CompletionRecord, ...]:
        """The first of them, to be read."""
        config, rewards = self._config.job.rollouts, self._rewards
        if rewards is None or config is None:
            return ()
        records: list[CompletionRecord] = []
        for one in found:
            together_N = rewards.together(one.rewards_NF, self._size).flatten()
            for place in range(min(len(one.texts), config.num_completions_to_print - len(records))):
                records.append(
                    CompletionRecord(
                        step=step,
                        prompt=one.started.rows_N[place].columns["prompt"],
                        completion=one.texts[place],
                        rewards=rewards.by_name(one.rewards_NF[place]),
                        reward=float(together_N[place]),
                        truncated=one.completions[place].is_truncated,
                    )
                )
        return tuple(records)
