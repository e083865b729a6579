"""Advantages equal to the papers' formulas, written out group by group."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest

from tests.support.training.post_training.policy_task import grpo
from tllm.training.policy.advantages import advantages, weighted_sums

REWARDS = [[1.0, 0.0, 0.5, 0.25], [0.0, 0.0, 0.0, 0.0], [3.0, -1.0, 2.0, 2.5]]
FOLDER = Path("/nowhere")


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_an_advantage_is_a_reward_less_its_groups_mean_in_units_of_the_deviation(scale: str) -> None:
    got = advantages(np.array(REWARDS), grpo(FOLDER, scale_rewards=scale))
    every = statistics.stdev(reward for group in REWARDS for reward in group)
    for group, row in zip(REWARDS, got, strict=True):
        by = {"group": statistics.stdev(group) + 1e-4, "batch": every + 1e-4, "none": 1.0}[scale]
        for reward, advantage in zip(group, row, strict=True):
            assert abs(advantage - (reward - statistics.mean(group)) / by) < 1e-12
    assert not got[1].any()


def test_rloo_compares_each_with_the_others_of_its_group() -> None:
    got = advantages(np.array(REWARDS), grpo(FOLDER, advantage="rloo", scale_rewards="none"))
    for group, row in zip(REWARDS, got, strict=True):
        for place, (reward, advantage) in enumerate(zip(group, row, strict=True)):
            others = [*group[:place], *group[place + 1 :]]
            assert abs(advantage - (reward - statistics.mean(others))) < 1e-12


def test_a_reward_is_the_weighted_sum_of_those_that_were_said() -> None:
    rewards_NF = np.array([[1.0, 2.0], [np.nan, 3.0], [0.5, np.nan]])
    assert weighted_sums(rewards_NF, None).tolist() == [3.0, 3.0, 0.5]
    assert weighted_sums(rewards_NF, (2.0, -1.0)).tolist() == [0.0, -3.0, 1.0]
