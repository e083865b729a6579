"""Advantages: how much better a completion's reward is than a baseline.

GRPO (2402.03300): the baseline is the mean of the completion's group, and the unit the group's standard deviation. Dr.
GRPO (2503.20783) does not divide. RLOO (2402.14740): the baseline is the mean of the group's other completions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tllm.training.job.rollout_keys import GRPOConfig

Rewards = NDArray[np.float64]

SMALLEST_STD = 1e-4
"""Added to a standard deviation before it divides, as in TRL."""


def advantages(rewards_PG: Rewards, config: GRPOConfig) -> Rewards:
    """Of the rewards of each prompt's group, [prompts, num_generations]; in the same places."""
    size = rewards_PG.shape[1]
    centred_PG: Rewards = rewards_PG - rewards_PG.mean(1, keepdims=True)
    if config.advantage == "rloo":
        centred_PG *= size / (size - 1)  # r - (sum - r) / (size - 1)
    if config.scale_rewards == "group":
        centred_PG /= rewards_PG.std(1, ddof=1, keepdims=True) + SMALLEST_STD
    elif config.scale_rewards == "batch":
        centred_PG /= rewards_PG.std(ddof=1) + SMALLEST_STD
    return centred_PG


def weighted_sums(rewards_NF: Rewards, weights: tuple[float, ...] | None) -> Rewards:
    """The reward of each completion from those of all functions; a function that has none for it (NaN) counts 0."""
    weights_F = np.ones(rewards_NF.shape[1]) if weights is None else np.array(weights)
    total_N: Rewards = np.nansum(rewards_NF * weights_F, axis=1)
    return total_N
