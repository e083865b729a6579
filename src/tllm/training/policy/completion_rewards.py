"""`CompletionRewards`: rank 0's reward functions, loaded once, and the rewards that they give to completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tllm.core.errors import ConfigError
from tllm.core.timing import Deadline
from tllm.text.tokenizer import Tokenizer
from tllm.training.job.rollout_keys import RolloutConfig, is_url
from tllm.training.policy.advantages import Rewards, weighted_sums
from tllm.training.policy.http_rewards import http_reward
from tllm.training.policy.reward_functions import ALWAYS, RewardFunction, load_reward_function
from tllm.training.policy.rollouts import Completion
from tllm.training.policy.started_prompts import StartedPrompts
from tllm.training.reward_models.model_rewards import ModelRewards
from tllm.training.tools.environments import Environments
from tllm.training.tools.user_functions import UserModules

ENVIRONMENTS = "environments"
Written = str | list[dict[str, Any]]
"""A completion's text; where a job has tools, the messages of its turns."""


class CompletionRewards:
    """Steps and evaluations ask the same functions. Letters: P prompts, G completions of each, N = P G, F functions.

    ConfigError where neither a function nor an environment rewards anything.
    """

    def __init__(
        self,
        config: RolloutConfig,
        tokenizer: Tokenizer,
        modules: UserModules,
        environments: Environments | None = None,
        model: ModelRewards | None = None,
    ) -> None:
        self._config, self._tokenizer, self.environments = config, tokenizer, environments
        seconds = config.reward_timeout
        self._functions: list[RewardFunction | ModelRewards] = [
            http_reward(text, seconds) if is_url(text) else load_reward_function(text, seconds, modules)
            for text in config.reward_funcs
        ]
        self._weights, self._turn = config.reward_weights, modules.turn
        if environments is not None and environments.has_reward:
            self._functions.append(_own_reward(environments, seconds))
            self._weights = None if config.reward_weights is None else (*config.reward_weights, 1.0)
        self._model = model
        if model is not None:
            self._functions.append(model)
            self._weights = None if self._weights is None else (*self._weights, 1.0)
        if not self._functions:
            raise ConfigError(
                f"there are no reward_funcs, and the environment {config.environment_factory} has no get_reward",
                "name a function that rewards completions, or give the environment get_reward(self) -> float",
            )
        self.stop_ids = tokenizer.eos_ids

    def close(self) -> None:
        """Let go of the reward model."""
        if self._model is not None:
            self._model.close()

    def texts(self, completions: Sequence[Completion]) -> list[Written]:
        """As functions get them and people read them."""
        return [self._written(one) for one in completions]

    def _written(self, completion: Completion) -> Written:
        if completion.turns is not None:
            return [dict(message) for message in completion.turns.messages]
        return self._tokenizer.decode(completion.ids, skip_special_tokens=True)

    def of(self, started: StartedPrompts, completions: Sequence[Completion], texts: Sequence[Written]) -> Rewards:
        """What each function says of each completion, [N, F], NaN for nothing. Their environments are then free.

        ConfigError, in one line, for a function that fails, or where none says anything of a completion.
        """
        each = [row.columns for row in started.rows_N]
        prompts = [columns["prompt"] for columns in each]
        names = {name for columns in each for name in columns} - {"prompt", *ALWAYS}
        arguments: dict[str, list[Any]] = {
            "prompts": prompts,
            "completions": [
                [{"role": "assistant", "content": text}]
                if isinstance(text, str) and not isinstance(prompt, str)
                else text
                for prompt, text in zip(prompts, texts, strict=True)
            ],
            "completion_ids": [list(one.ids) for one in completions],
            **{name: [columns.get(name) for columns in each] for name in sorted(names)},
        }
        own = {} if self.environments is None else {ENVIRONMENTS: self.environments.instances(started.seeds_N)}
        deadline = Deadline(self._config.reward_timeout)
        said = [self._said(function, arguments, own, deadline) for function in self._functions]
        if self.environments is not None:
            self.environments.end(started.seeds_N)
        rewards_NF = np.array(said, dtype=np.float64).T
        unsaid = np.isnan(rewards_NF).all(1)
        if unsaid.any():
            raise ConfigError(
                f"no reward function says anything of completion {int(unsaid.argmax())}: all of "
                f"{', '.join(function.name for function in self._functions)} returned None",
                "let one of them return a number",
            )
        return rewards_NF

    def _said(
        self,
        function: RewardFunction | ModelRewards,
        arguments: dict[str, Any],
        own: dict[str, Any],
        deadline: Deadline,
    ) -> list[float]:
        """`own` is for functions of the user's alone, who take turns; others ask programs elsewhere."""
        if isinstance(function, ModelRewards):
            return function(arguments)
        if function.file is None:
            return function(arguments, deadline)
        with self._turn:
            return function(arguments | own, deadline)

    def together(self, rewards_NF: Rewards, size: int) -> Rewards:
        """The reward of each completion of each prompt, [P, G], by the functions' weights."""
        return weighted_sums(rewards_NF, self._weights).reshape(-1, size)

    def by_name(self, reward_F: Rewards) -> dict[str, float | None]:
        """What the functions say of one completion, None for nothing."""
        said = zip(self._functions, reward_F.tolist(), strict=True)
        return {function.name: None if value != value else value for function, value in said}

    def metrics(self, completions: Sequence[Completion], rewards_NF: Rewards, reward_PG: Rewards) -> dict[str, float]:
        """Of lengths and rewards, by TRL's names."""
        metrics = length_metrics(completions) | tool_metrics(completions)
        for function, reward_N in zip(self._functions, rewards_NF.T, strict=True):
            said_N = reward_N[~np.isnan(reward_N)]
            if len(said_N):
                metrics[f"rewards/{function.name}/mean"] = float(said_N.mean())
                metrics[f"rewards/{function.name}/std"] = float(said_N.std(ddof=1)) if len(said_N) > 1 else 0.0
        std_P = reward_PG.std(1, ddof=1) if reward_PG.shape[1] > 1 else np.zeros(len(reward_PG))
        metrics["reward"], metrics["reward_std"] = float(reward_PG.mean()), float(std_P.mean())
        # The mean of equal rewards may be rounded, and their deviation is then not 0.
        metrics["frac_reward_zero_std"] = float(np.isclose(std_P, 0.0).mean())
        return metrics


def _own_reward(environments: Environments, seconds: float) -> RewardFunction:
    """What each completion's environment says of it."""

    def rewards(environments: Sequence[Any], **columns: Any) -> list[Any]:
        return [one.get_reward() for one in environments]

    return RewardFunction(environments.name, environments.file, rewards, seconds)


def length_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """How long the completions of a step are, those that ended and all, by TRL's names; without what tools wrote."""
    lengths = [one.num_sampled for one in completions]
    ended = [one.num_sampled for one in completions if not one.is_truncated]
    return {
        "completions/mean_length": float(np.mean(lengths)),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
        "completions/mean_terminated_length": float(np.mean(ended)) if ended else 0.0,
    }


def tool_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """How often tools were called for each completion, and the part of calls that failed; nothing without tools."""
    turns = [one.turns for one in completions if one.turns is not None]
    if not turns:
        return {}
    calls, failures = sum(one.num_calls for one in turns), sum(one.num_failures for one in turns)
    return {"tools/call_frequency": calls / len(turns), "tools/failure_frequency": failures / calls if calls else 0.0}
