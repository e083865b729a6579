"""`RewardedRows`: rank 0's part in learning from rewards: it chooses prompts, has completions rewarded, and makes rows
of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from tllm.training.data.batch_tensors import PROMPT_LENGTH
from tllm.training.data.encoder import IGNORED, Values
from tllm.training.data.packing import PackedRow
from tllm.training.data.prompt_batches import PromptBatches, PromptRow
from tllm.training.evaluation.completion_record import CompletionRecord
from tllm.training.job.job import Job
from tllm.training.job.rollout_keys import GRPOConfig, RejectionConfig
from tllm.training.objectives.policy_gradient import ADVANTAGE, SAMPLED
from tllm.training.policy.advantages import Rewards, advantages
from tllm.training.policy.completion_rewards import CompletionRewards, Written
from tllm.training.policy.completions_file import CompletionsFile
from tllm.training.policy.rollouts import Completion, PromptGroup, completion_seed
from tllm.training.policy.started_prompts import StartedPrompts, start_prompts


@dataclass(frozen=True)
class RewardedGroup:
    """A row's completions with the prompt of each, what each function and all together say of each, and its advantage
    (GRPO)."""

    prompts: Sequence[PromptRow]
    completions: Sequence[Completion]
    texts: Sequence[Written]
    rewards_GF: Rewards
    reward_G: Rewards
    advantage_G: Rewards | None


class RewardedRows:
    """Asks for completions, and makes rows of those that came. `prepare` is called before the first step."""

    def __init__(self, job: Job, prompts: PromptBatches, rewards: CompletionRewards) -> None:
        config = job.rollouts
        assert config is not None, "checked when the run began"
        self.config, self._job, self._prompts, self._rewards = config, job, prompts, rewards
        self.stop_ids = rewards.stop_ids
        self._started: dict[int, StartedPrompts] = {}
        self._file: CompletionsFile | None = None

    def prepare(self, done: int) -> None:
        """Go on after `done` steps."""
        self._file = CompletionsFile(Path(self._job.output_dir), done)

    def groups(self, step: int) -> list[PromptGroup]:
        """What is to be sampled for step `step`, the first being 0."""
        rows, seed, numbers = self._prompts.prompts(step), self._job.seed, range(self.config.num_generations)
        seeds = [[completion_seed(seed, step, place, number) for number in numbers] for place in range(len(rows))]
        self._started[step] = started = start_prompts(rows, seeds, self._prompts, self._rewards.environments)
        return list(started.groups)

    def learned(self, step: int, completions: Sequence[Completion]) -> tuple[list[PackedRow], dict[str, float]]:
        """The rows of the step from what was sampled for `groups`, in order, and metrics. ConfigError for a reward."""
        size, started = self.config.num_generations, self._started.pop(step)
        rows_N = started.rows_N
        assert len(completions) == len(rows_N), "as many as were asked for"
        texts = self._rewards.texts(completions)
        rewards_NF = self._rewards.of(started, completions, texts)
        reward_PG = self._rewards.together(rewards_NF, size)
        advantage_PG = advantages(reward_PG, self.config) if isinstance(self.config, GRPOConfig) else None
        groups = [
            RewardedGroup(
                rows_N[own],
                completions[own],
                texts[own],
                rewards_NF[own],
                reward_PG[place],
                None if advantage_PG is None else advantage_PG[place],
            )
            for place, own in enumerate(slice(at, at + size) for at in range(0, len(rows_N), size))
        ]
        self._write(step, groups)
        metrics = self._rewards.metrics(completions, rewards_NF, reward_PG)
        config = self.config
        if isinstance(config, RejectionConfig):
            best = [row for group in groups for row in best_rows(group, config)]
            return best, metrics | {"rejection/kept_ratio": len(best) / (len(groups) * config.keep)}
        return [row for group in groups for row in self._policy_rows(group)], metrics

    def position(self, step: int) -> bytes:
        """Where in the data `step` begins, as snapshots keep it."""
        return msgspec.msgpack.encode(self._prompts.state(step))

    def close(self) -> None:
        self._prompts.close()
        if self._file is not None:
            self._file.close()

    def _policy_rows(self, group: RewardedGroup) -> list[PackedRow]:
        config = self.config
        assert isinstance(config, GRPOConfig) and group.advantage_G is not None
        weights = {"grpo": 1.0, "dr_grpo": float(config.max_completion_length)}
        return [
            completion_row(
                prompt.ids,
                completion,
                is_learned=not (completion.is_truncated and config.mask_truncated_completions),
                advantage=float(advantage),
                weight=weights.get(config.loss_type),
            )
            for prompt, completion, advantage in zip(group.prompts, group.completions, group.advantage_G, strict=True)
        ]

    def _write(self, step: int, groups: Sequence[RewardedGroup]) -> None:
        """A few completions to be read: the first groups', whole ones as far as they go."""
        records = []
        for group in groups:
            for number, text in enumerate(group.texts):
                records.append(
                    CompletionRecord(
                        step=step + 1,
                        prompt=group.prompts[number].columns["prompt"],
                        completion=text,
                        rewards=self._rewards.by_name(group.rewards_GF[number]),
                        reward=float(group.reward_G[number]),
                        advantage=None if group.advantage_G is None else float(group.advantage_G[number]),
                        truncated=group.completions[number].is_truncated,
                    )
                )
        assert self._file is not None, "prepare comes first"
        self._file.write(records[: self.config.num_completions_to_print])


def completion_row(
    prompt_ids: Sequence[int],
    completion: Completion,
    is_learned: bool = True,
    advantage: float | None = None,
    weight: float | None = None,
) -> PackedRow:
    """A row of a prompt and its completion, whose tokens are predicted, but those that tools wrote; of one that is not
    learned, none."""
    ids = np.array([*prompt_ids, *completion.ids], dtype=np.int64)
    labels = np.full(len(ids), IGNORED, dtype=np.int64)
    sampled = np.zeros(len(ids), dtype=np.float64)
    predicted = slice(len(prompt_ids) - 1, len(ids) - 1)
    sampled[predicted] = completion.log_probs
    if is_learned:
        labels[predicted] = completion.ids
        if completion.turns is not None:
            labels[predicted][np.array(completion.turns.tool_mask) == 0] = IGNORED
    return PackedRow(
        0,
        ids,
        labels,
        np.arange(len(ids), dtype=np.int64),
        (len(ids),),
        (),
        _of_document(len(prompt_ids), advantage),
        {SAMPLED: sampled} if advantage is not None else {},
        weight,
    )


def _of_document(prompt_length: int, advantage: float | None) -> Values:
    """What a policy's loss asks of a completion."""
    if advantage is None:
        return {}
    return {ADVANTAGE: np.array([advantage], dtype=np.float64), PROMPT_LENGTH: np.array([prompt_length])}


def best_rows(group: RewardedGroup, config: RejectionConfig) -> list[PackedRow]:
    """Rows of a prompt's best completions, the first of those that are equal; none of what the job does not want."""
    best_first = np.argsort(-group.reward_G, kind="stable")
    wanted = [
        int(number)
        for number in best_first
        if (config.threshold is None or group.reward_G[number] >= config.threshold)
        and not (config.mask_truncated_completions and group.completions[number].is_truncated)
    ]
    return [completion_row(group.prompts[number].ids, group.completions[number]) for number in wanted[: config.keep]]
