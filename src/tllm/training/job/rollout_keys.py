"""The tables `[grpo]` and `[rejection]` of a job: how completions are sampled, rewarded, and learned from.

Keys have the names of TRL's `GRPOConfig`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

from tllm.core.errors import ConfigError
from tllm.training.job.key_limits import (
    ALONE,
    KeyLimits,
    WantedNodes,
    check_addresses,
    check_one_place,
    check_role_plan,
)

FUNCTION = re.compile(r"(?P<module>.*\.py|\w+(\.\w+)*):(?P<function>[A-Za-z_]\w*)")
"""`module:function`, and `PATH.py:function`, as a job has it once its folder is known."""

REWARD_SECONDS = 600.0
"""Reward functions have less: so long do the other ranks wait for rank 0, which calls them."""

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType({"reward_dtype": ("float32", "bfloat16", "float64")})

CORRECTION_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

AT_LEAST: Mapping[str, float] = MappingProxyType(
    {
        "reward_timeout": 1,
        "num_generations": 1,
        "max_completion_length": 1,
        "top_k": 0,
        "max_num_seqs": 1,
        "num_completions_to_print": 0,
        "num_generations_eval": 1,
        "max_tool_calling_iterations": 1,
        "max_staleness": 0,
    }
)


@dataclass(frozen=True)
class RolloutConfig:
    """How completions of prompts are sampled, and which functions reward them."""

    reward_funcs: tuple[str, ...] = ()
    """What rewards completions. Python functions, as `module:function`: `rewards:brackets` is the function `brackets`
    of `rewards.py` in the folder of the job's file; they are your own code, and run on rank 0. Or addresses of HTTP
    servers (`http://HOST:PORT/score` of a reward model, or any that answers with rewards). At least one is needed, or
    `reward_model_name_or_path`."""
    reward_weights: tuple[float, ...] | None = None
    """A weight for each of `reward_funcs`; left out, each counts 1. The weighted sum is a completion's reward."""
    reward_model_name_or_path: str | None = None
    """One more reward, of weight 1: the score that this reward model gives a prompt with its completion, its folder or
    its name. It is computed in the process of rank 0, or on `reward_nodes`."""
    reward_dtype: str = "float32"
    """What the reward model computes in: "float32", "bfloat16" or "float64"."""
    reward_nodes: tuple[int | str, ...] = ()
    """Nodes of the run's own cluster that compute the reward model and do not train: so many, or by their names; or
    "auto", as many as the planner finds best, none perhaps."""
    reward_plan: str = ALONE
    """With `reward_nodes`: how the nodes of one reward model divide it, by `pp` and `tp`: with "pp=2" two nodes are one
    model, and four are two. "auto": as the planner finds best. Left out, each node holds it whole."""
    reward_timeout: float = 60.0
    """Seconds that all reward functions together may take for the completions of one step, and tools for all calls of
    one turn of them; then the run saves and ends."""
    num_generations: int = 8
    """Completions that are sampled of each prompt: its group. `global_batch_size` counts completions, and is a
    multiple."""
    max_completion_length: int = 256
    """Largest number of tokens in a completion, which is cut off there. A prompt may have as many as are left of
    `seq_len`."""
    temperature: float = 1.0
    """Temperature that tokens are sampled at, and at which their probabilities are learned from."""
    top_p: float = 1.0
    """Only the likeliest tokens that have this probability together are sampled; 1: all."""
    top_k: int = 0
    """Only so many of the likeliest tokens are sampled; 0: all."""
    mask_truncated_completions: bool = False
    """Learn nothing from a completion that was cut off at `max_completion_length`."""
    max_num_seqs: int = 32
    """Completions that one replica computes at once. Its KV cache has room for so many of `seq_len` tokens."""
    num_completions_to_print: int = 4
    """Completions of each step that are written to `completions.jsonl` in the run's folder, to be read; and of each
    evaluation to `eval_completions.jsonl`."""
    rollout_servers: tuple[str, ...] = ()
    """Addresses (`HOST:PORT`) where `tllm rollout` samples the completions, each with a share of the prompts; left out,
    the ranks that train sample them, or `rollout_nodes`."""
    rollout_secret: str = "rollout.key"
    """With `rollout_servers`: the file of the secret by which they and the run trust each other (`tllm rollout
    --secret`)."""
    rollout_nodes: tuple[int | str, ...] = ()
    """Instead of `rollout_servers`: nodes of the run's own cluster that sample and do not train, so many, or by their
    names; or "auto", as many as the planner finds best, none perhaps."""
    rollout_plan: str = ALONE
    """With `rollout_nodes`: how the nodes of one engine divide the model, by `pp` and `tp`: with "pp=2" two nodes are
    one engine, and four are two. "auto": as the planner finds best. Left out, each node holds it whole."""
    max_staleness: int = 0
    """With `rollout_servers` or `rollout_nodes`: optimizer steps by which the weights that sample may be older than
    those that learn. These machines then sample so many steps ahead while the trainer learns; 0: the trainer waits."""
    num_generations_eval: int | None = None
    """Completions that an evaluation samples of each prompt of `eval_files`; left out: `num_generations`."""
    tools: tuple[str, ...] = ()
    """Python functions that the model may call while it writes a completion, as `module:function`: `tools:calculator`
    is the function `calculator` of `tools.py` in the folder of the job's file. They have type hints and a docstring in
    Google's style, are your own code, and run on rank 0. Prompts are messages then."""
    max_tool_calling_iterations: int | None = None
    """Turns of a completion whose calls are made, at most; left out: as many as `max_completion_length` has room for.
    What tools return counts in that length and is not learned."""

    environment_factory: str | None = None
    """A Python class, or a function that makes objects, as `module:Class`: each completion has an object of its own,
    whose public methods are tools with a state. `reset(**row)` is called before it, and may return a text for the end
    of the prompt; `get_reward()`, where there is one, is one more reward. Your own code too, as tools are."""

    @property
    def calls_tools(self) -> bool:
        """Whether completions have turns, in which a model may call functions."""
        return bool(self.tools) or self.environment_factory is not None

    @property
    def reward_model(self) -> str:
        """By what its reward is told; "" without one."""
        return Path(self.reward_model_name_or_path or "").name

    @property
    def own_code(self) -> tuple[str, ...]:
        """The functions and classes of the user's that rank 0 runs, and the servers that it asks for rewards."""
        factory = () if self.environment_factory is None else (self.environment_factory,)
        return (*self.reward_funcs, *self.tools, *factory)

    def located(self, folder: Path) -> Self:
        """The same with functions and classes by the path of their file; their modules lie in `folder`."""
        rewards = tuple(text if is_url(text) else located_function(text, folder) for text in self.reward_funcs)
        tools = tuple(located_function(text, folder, "tools") for text in self.tools)
        factory = self.environment_factory and located_function(self.environment_factory, folder, "environment_factory")
        return replace(self, reward_funcs=rewards, tools=tools, environment_factory=factory)

    def _check(self, table: str, limits: KeyLimits) -> None:
        limits.check(self, table)
        check_addresses(self.rollout_servers, f"{table}.rollout_servers")
        check_one_place(self.rollout_servers, self.rollout_nodes, f"{table}.rollout_servers", f"{table}.rollout_nodes")
        check_role_plan(table, "rollout", self.rollout_plan, self.rollout_nodes)
        self._check_reward_model(table)
        if not self.reward_funcs and self.environment_factory is None and not self.reward_model:
            raise ConfigError(
                f"{table}.reward_funcs is empty", 'name a function that rewards completions: ["rewards:correct"]'
            )
        names = _reward_names(self, table)
        called = [_parts(text, table, "tools")[1] for text in self.tools]
        for key, each, reason in (
            ("reward_funcs", names, "metrics are told by the name of a function, or of an environment"),
            ("tools", called, "the model calls functions by their names"),
        ):
            if len(set(each)) < len(each):
                raise ConfigError(
                    f"{table}.{key} has two functions of one name: {', '.join(sorted(each))}", f"{reason}: rename one"
                )
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            raise ConfigError(
                f"{table} has {len(self.reward_weights)} reward_weights and {len(self.reward_funcs)} reward_funcs",
                "give one weight for each function",
            )
        self.check_staleness(table)
        if self.temperature <= 0:
            raise ConfigError(
                f"{table}.temperature is {self.temperature}: all completions of a prompt would be the same",
                "give one above 0",
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"{table}.top_p is {self.top_p}", "give one above 0, and 1 for all tokens")

    def _check_reward_model(self, table: str) -> None:
        wanted = WantedNodes.of(self.reward_nodes, f"{table}.reward_nodes")
        if self.reward_nodes and not self.reward_model:
            raise ConfigError(
                f"{table}.reward_nodes is given and {table}.reward_model_name_or_path is not",
                "name the reward model that they compute, or leave reward_nodes out",
            )
        check_role_plan(table, "reward", self.reward_plan, self.reward_nodes)
        sampling = WantedNodes.of(self.rollout_nodes, f"{table}.rollout_nodes").names
        if twice := sorted(set(wanted.names) & set(sampling)):
            raise ConfigError(f"{table}.reward_nodes and rollout_nodes both name {twice[0]}", "give each node one role")

    def check_staleness(self, table: str) -> None:
        """ConfigError where nobody is there who could sample ahead."""
        given = f"{table}.max_staleness is {self.max_staleness}"
        if self.max_staleness and not (self.rollout_servers or self.rollout_nodes):
            raise ConfigError(
                f"{given} and {table}.rollout_servers and rollout_nodes are empty: the ranks that train sample with "
                "the weights that they have",
                "name machines that sample while the trainer learns, or leave max_staleness out",
            )
        if self.max_staleness and "auto" in self.rollout_nodes:
            raise ConfigError(
                f'{given} and {table}.rollout_nodes is "auto", which may come to none',
                "say how many nodes sample while the trainer learns",
            )


@dataclass(frozen=True)
class GRPOConfig(RolloutConfig):
    """Learn from groups of completions by how much better each is than its group (GRPO, 2402.03300, and its kin)."""

    beta: float = 0.0
    """Coefficient of the KL divergence to the reference, which is the model that the run began with; 0: no reference
    is kept."""
    kl_estimator: str = "k3"
    """How the divergence is estimated of a token, with r = log p_reference - log p: "k1" is -r, "k2" r²/2, "k3"
    exp(r) - r - 1 (Schulman, 2020)."""
    epsilon: float = 0.2
    """How far below 1 the ratio of new to old probability is learned from."""
    epsilon_high: float | None = None
    """How far above 1 it is (clip-higher, DAPO, 2503.14476); left out: `epsilon`."""
    loss_type: str = "dapo"
    """How tokens are added up: "grpo" the mean over completions of each one's mean; "dapo" the mean over all tokens of
    the step, as is "bnpo"; "dr_grpo" the sum over completions times `max_completion_length` (2503.20783)."""
    importance_sampling_level: str = "token"
    """What has a ratio of new to old probability: each "token", or the "sequence" by its tokens' geometric mean (GSPO,
    2507.18071)."""
    advantage: str = "group"
    """What a reward is compared with: the mean of its "group", or with "rloo" that of the others of its group
    (2402.14740)."""
    scale_rewards: str = "group"
    """What advantages are divided by: the standard deviation of rewards in their "group", that of the whole "batch", or
    "none"."""
    num_iterations: int = 1
    """Steps taken with the same completions, before new ones are sampled."""
    rollout_importance_sampling_correction: bool | None = None
    """Weigh what is learned of each token by the probability that the weights have for it which a step begins with,
    over that of the weights that sampled it; left out: where `max_staleness` is above 0. This key and the three after
    it are TRL's, which has `vllm` for `rollout` in their names."""
    rollout_importance_sampling_mode: str = "token_truncate"
    """What has such a ratio, each "token" or the whole "sequence" (the product of its tokens'), and what becomes of one
    outside its bounds: "truncate" sets it to the bound, "mask" to 0."""
    rollout_importance_sampling_clip_max: float = 3.0
    """Upper bound of the ratio."""
    rollout_importance_sampling_clip_min: float = 0.0
    """Lower bound of the ratio; 0: none."""

    LIMITS = KeyLimits(
        at_least={
            **AT_LEAST,
            "num_generations": 2,
            "beta": 0,
            "epsilon": 0,
            "epsilon_high": 0,
            "num_iterations": 1,
            "rollout_importance_sampling_clip_min": 0,
        },
        below={"reward_timeout": REWARD_SECONDS, "epsilon": 1},
        choices={
            **CHOICES,
            "kl_estimator": ("k1", "k2", "k3"),
            "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo"),
            "importance_sampling_level": ("token", "sequence"),
            "advantage": ("group", "rloo"),
            "scale_rewards": ("group", "batch", "none"),
            "rollout_importance_sampling_mode": CORRECTION_MODES,
        },
    )

    def __post_init__(self) -> None:
        self._check("grpo", self.LIMITS)
        if self.advantage == "rloo" and self.scale_rewards != "none":
            raise ConfigError(
                f'grpo.advantage is "rloo" and grpo.scale_rewards is {self.scale_rewards!r}: RLOO divides by nothing',
                'give scale_rewards = "none"',
            )
        low, high = self.rollout_importance_sampling_clip_min, self.rollout_importance_sampling_clip_max
        if not low < high:
            raise ConfigError(
                f"grpo.rollout_importance_sampling_clip_min is {low} and grpo.rollout_importance_sampling_clip_max is "
                f"{high}",
                "give bounds with room between them",
            )
        if self.max_staleness % self.num_iterations:
            raise ConfigError(
                f"grpo.max_staleness is {self.max_staleness} and grpo.num_iterations is {self.num_iterations}: weights "
                "go to the servers where new completions are sampled",
                "make max_staleness a multiple",
            )

    @property
    def is_corrected(self) -> bool:
        """Whether ratios of the weights that learn to those that sampled weigh what is learned."""
        asked = self.rollout_importance_sampling_correction
        return self.max_staleness > 0 if asked is None else asked

    @property
    def clip_range(self) -> tuple[float, float]:
        """The ratios between which the loss has a gradient."""
        return 1 - self.epsilon, 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)


@dataclass(frozen=True)
class RejectionConfig(RolloutConfig):
    """Learn the best completions of each prompt by the next token's loss (rejection sampling, best of n)."""

    keep: int = 1
    """The best so many completions of each prompt are learned."""
    threshold: float | None = None
    """Completions whose reward is lower are not learned, be they the best of their prompt."""

    LIMITS = KeyLimits(at_least={**AT_LEAST, "keep": 1}, below={"reward_timeout": REWARD_SECONDS}, choices=CHOICES)

    def __post_init__(self) -> None:
        self._check("rejection", self.LIMITS)
        if self.keep > self.num_generations:
            raise ConfigError(
                f"rejection.keep is {self.keep} and rejection.num_generations is {self.num_generations}",
                "no more can be kept than are sampled",
            )


def is_url(text: str) -> bool:
    """Whether a reward comes from an HTTP server."""
    return text.startswith(("http://", "https://"))


def reward_metrics(config: RolloutConfig) -> tuple[str, ...]:
    """The metrics that evaluations can be compared by: the mean of all rewards, and that of each function."""
    return ("reward", *(f"rewards/{name}/mean" for name in _reward_names(config, "the job")))


def _reward_names(config: RolloutConfig, table: str) -> list[str]:
    """By which metrics tell the rewards: those of functions and servers, of an environment, and of a reward model."""
    names = [text if is_url(text) else _parts(text, table)[1] for text in config.reward_funcs]
    if config.environment_factory is not None:
        names.append(_parts(config.environment_factory, table, "environment_factory")[1])
    return [*names, config.reward_model] if config.reward_model else names


def completions_evaluated(config: RolloutConfig) -> int:
    """Of each prompt held out."""
    return config.num_generations if config.num_generations_eval is None else config.num_generations_eval


def function_parts(text: str) -> tuple[Path, str]:
    """The file and the function that a located reward function or tool names."""
    module, name = _parts(text, "the job")
    return Path(module), name


def _parts(text: str, table: str, key: str = "reward_funcs") -> tuple[str, str]:
    match = FUNCTION.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{table}: {key} names {text!r}",
            "write module:function, as rewards:correct for the function correct of rewards.py beside the job's file",
        )
    return match["module"], match["function"]


def located_function(text: str, folder: Path, key: str = "reward_funcs") -> str:
    """`module:function` with the path of its file, which lies in `folder`. ConfigError for what names none."""
    module, name = _parts(text, "the job", key)
    file = folder / (module if module.endswith(".py") else module.replace(".", "/") + ".py")
    return f"{file.resolve()}:{name}"


def kept_of_each_prompt(config: RolloutConfig) -> int:
    """Completions of a prompt that come to be rows of a step, at most."""
    return config.keep if isinstance(config, RejectionConfig) else config.num_generations
