"""`RewardedRows`: rank 0's part of sampling: which prompts, what completions are worth, what is learned of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tllm.core.errors import ConfigError
from tllm.text.tokenizer import Tokenizer
from tllm.training.data.encoder import IGNORED
from tllm.training.data.packing import PackedRow
from tllm.training.data.prompt_batches import PromptBatches, PromptRow
from tllm.training.job.job import Job
from tllm.training.job.rollout_keys import GRPOConfig, RejectionConfig, is_url
from tllm.training.objectives.policy_gradient import ADVANTAGE, SAMPLED
from tllm.training.policy.advantages import Rewards, advantages, weighted_sums
from tllm.training.policy.completions_file import CompletionRecord, CompletionsFile
from tllm.training.policy.http_rewards import http_reward
from tllm.training.policy.reward_functions import load_reward_function
from tllm.training.policy.rollouts import Completion, PromptGroup, completion_seed

RESERVED = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True)
class RewardedGroup:
    """A prompt's completions, what each function and all together say of each, and its advantage (GRPO)."""

    prompt: PromptRow
    completions: Sequence[Completion]
    texts: Sequence[str]
    rewards_GF: Rewards
    reward_G: Rewards
    advantage_G: Rewards | None


class RewardedRows:
    """Asks for completions, and makes rows of those that came. `prepare` is called before the first step."""

    def __init__(self, job: Job, prompts: PromptBatches, tokenizer: Tokenizer) -> None:
        config = job.rollouts
        assert config is not None, "checked when the run began"
        self.config, self._job, self._prompts, self._tokenizer = config, job, prompts, tokenizer
        self._functions = [
            (http_reward if is_url(text) else load_reward_function)(text, config.reward_timeout)
            for text in config.reward_funcs
        ]
        self.stop_ids = tokenizer.eos_ids
        self._rows: list[PromptRow] = []
        self._file: CompletionsFile | None = None

    def prepare(self, done: int) -> None:
        """Go on after `done` steps."""
        self._file = CompletionsFile(Path(self._job.output_dir), done)

    def groups(self, step: int) -> list[PromptGroup]:
        """What is to be sampled for step `step`, the first being 0."""
        self._rows = self._prompts.prompts(step)
        numbers = range(self.config.num_generations)
        return [
            PromptGroup(row.ids, tuple(completion_seed(self._job.seed, step, place, number) for number in numbers))
            for place, row in enumerate(self._rows)
        ]

    def learned(self, step: int, completions: Sequence[Completion]) -> tuple[list[PackedRow], dict[str, float]]:
        """The rows of the step from what was sampled for `groups`, in order, and metrics. ConfigError for a reward."""
        size = self.config.num_generations
        assert len(completions) == size * len(self._rows), "as many as were asked for"
        texts = [self._tokenizer.decode(one.ids, skip_special_tokens=True) for one in completions]
        rewards_NF = self._rewards(completions, texts)
        reward_PG = weighted_sums(rewards_NF, self.config.reward_weights).reshape(-1, size)
        advantage_PG = advantages(reward_PG, self.config) if isinstance(self.config, GRPOConfig) else None
        groups = [
            RewardedGroup(
                row,
                completions[place * size : (place + 1) * size],
                texts[place * size : (place + 1) * size],
                rewards_NF[place * size : (place + 1) * size],
                reward_PG[place],
                None if advantage_PG is None else advantage_PG[place],
            )
            for place, row in enumerate(self._rows)
        ]
        self._write(step, groups)
        metrics = {**length_metrics(completions), **self._of_rewards(rewards_NF, reward_PG)}
        config = self.config
        if isinstance(config, RejectionConfig):
            rows = [row for group in groups for row in best_rows(group, config)]
            return rows, metrics | {"rejection/kept_ratio": len(rows) / (len(groups) * config.keep)}
        return [row for group in groups for row in self._policy_rows(group)], metrics

    def position(self, step: int) -> bytes:
        """Where in the data `step` begins, as snapshots keep it."""
        return msgspec.msgpack.encode(self._prompts.state(step))

    def close(self) -> None:
        self._prompts.close()
        if self._file is not None:
            self._file.close()

    def _rewards(self, completions: Sequence[Completion], texts: Sequence[str]) -> Rewards:
        """What each function says of each completion, NaN for nothing."""
        size = self.config.num_generations
        each = [row.columns for row in self._rows for _ in range(size)]
        prompts = [columns["prompt"] for columns in each]
        names = {name for columns in each for name in columns} - {"prompt", *RESERVED}
        arguments: dict[str, list[Any]] = {
            "prompts": prompts,
            "completions": [
                text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                for prompt, text in zip(prompts, texts, strict=True)
            ],
            "completion_ids": [list(one.ids) for one in completions],
            **{name: [columns.get(name) for columns in each] for name in sorted(names)},
        }
        rewards_NF = np.array([function(arguments) for function in self._functions], dtype=np.float64).T
        unsaid = np.isnan(rewards_NF).all(1)
        if unsaid.any():
            raise ConfigError(
                f"no reward function says anything of completion {int(unsaid.argmax())}: all of "
                f"{', '.join(function.name for function in self._functions)} returned None",
                "let one of them return a number",
            )
        return rewards_NF

    def _policy_rows(self, group: RewardedGroup) -> list[PackedRow]:
        config = self.config
        assert isinstance(config, GRPOConfig) and group.advantage_G is not None
        weights = {"grpo": 1.0, "dr_grpo": float(config.max_completion_length)}
        return [
            completion_row(
                group.prompt.ids,
                completion,
                is_learned=not (completion.is_truncated and config.mask_truncated_completions),
                advantage=float(advantage),
                weight=weights.get(config.loss_type),
            )
            for completion, advantage in zip(group.completions, group.advantage_G, strict=True)
        ]

    def _of_rewards(self, rewards_NF: Rewards, reward_PG: Rewards) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for function, reward_N in zip(self._functions, rewards_NF.T, strict=True):
            said_N = reward_N[~np.isnan(reward_N)]
            if len(said_N):
                metrics[f"rewards/{function.name}/mean"] = float(said_N.mean())
                metrics[f"rewards/{function.name}/std"] = float(said_N.std(ddof=1)) if len(said_N) > 1 else 0.0
        std_P = reward_PG.std(1, ddof=1) if reward_PG.shape[1] > 1 else np.zeros(len(reward_PG))
        metrics["reward"], metrics["reward_std"] = float(reward_PG.mean()), float(std_P.mean())
        metrics["frac_reward_zero_std"] = float((std_P == 0).mean())
        return metrics

    def _write(self, step: int, groups: Sequence[RewardedGroup]) -> None:
        """A few completions to be read: the first groups', whole ones as far as they go."""
        records = []
        for group in groups:
            for number, text in enumerate(group.texts):
                said = zip(self._functions, group.rewards_GF[number].tolist(), strict=True)
                records.append(
                    CompletionRecord(
                        step=step + 1,
                        prompt=group.prompt.columns["prompt"],
                        completion=text,
                        rewards={function.name: None if value != value else value for function, value in said},
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
    """A row of a prompt and its completion, whose tokens are predicted; of one that is not learned, none."""
    ids = np.array([*prompt_ids, *completion.ids], dtype=np.int64)
    labels = np.full(len(ids), IGNORED, dtype=np.int64)
    sampled = np.zeros(len(ids), dtype=np.float64)
    predicted = slice(len(prompt_ids) - 1, len(ids) - 1)
    sampled[predicted] = completion.log_probs
    if is_learned:
        labels[predicted] = completion.ids
    of_policy = advantage is not None
    return PackedRow(
        0,
        ids,
        labels,
        np.arange(len(ids), dtype=np.int64),
        (len(ids),),
        (),
        {ADVANTAGE: np.array([advantage], dtype=np.float64)} if of_policy else {},
        {SAMPLED: sampled} if of_policy else {},
        weight,
    )


def best_rows(group: RewardedGroup, config: RejectionConfig) -> list[PackedRow]:
    """Rows of a prompt's best completions, the first of those that are equal; none of what the job does not want."""
    best_first = np.argsort(-group.reward_G, kind="stable")
    wanted = [
        int(number)
        for number in best_first
        if (config.threshold is None or group.reward_G[number] >= config.threshold)
        and not (config.mask_truncated_completions and group.completions[number].is_truncated)
    ]
    return [completion_row(group.prompt.ids, group.completions[number]) for number in wanted[: config.keep]]


def length_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """How long the completions of a step are, those that ended and all, by TRL's names."""
    lengths = [len(one.ids) for one in completions]
    ended = [len(one.ids) for one in completions if not one.is_truncated]
    return {
        "completions/mean_length": float(np.mean(lengths)),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
        "completions/mean_terminated_length": float(np.mean(ended)) if ended else 0.0,
    }
