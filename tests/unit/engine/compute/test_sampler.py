"""Sampled tokens against everything that a choice must not depend on."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.engine.compute.test_logits_processing import softmax
from tllm.engine.compute.sampler import sample_token, token_logprobs
from tllm.engine.schedule.batch import Sampling


def test_draws_follow_the_chances() -> None:
    logits_V = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    draws = 20000
    counts = [0] * 5
    for position in range(draws):
        counts[sample_token(logits_V, Sampling(temperature=0.7, seed=5), position)] += 1
    for count, chance in zip(counts, softmax([x / 0.7 for x in logits_V.tolist()]), strict=True):
        assert abs(count - draws * chance) < 5 * math.sqrt(draws * chance * (1 - chance))


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    torch.manual_seed(0)
    rows = torch.randn(40, 300)
    asked = [Sampling(temperature=1.0, seed=seed, top_p=0.95) for seed in range(40)]
    there = [sample_token(rows[i], asked[i], 100 + i) for i in range(40)]
    torch.manual_seed(99)
    back = [sample_token(rows[i], asked[i], 100 + i) for i in reversed(range(40))]
    assert there == back[::-1]
    assert there != [sample_token(rows[i], asked[i], 101 + i) for i in range(40)]
    assert there != [sample_token(rows[i], asked[(i + 1) % 40], 100 + i) for i in range(40)]


@pytest.mark.parametrize("temperature", [1e-30, 1e-5, 1e4])
def test_extreme_temperatures_choose_something_allowed(temperature: float) -> None:
    logits_V = torch.tensor([3.0, 900.0, -900.0, 899.0])
    token = sample_token(logits_V, Sampling(temperature=temperature, seed=1, banned=(0,)), 0)
    assert token != 0
    if temperature < 1:
        assert token == 1


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert sample_token(torch.tensor([1.0, 5.0, 5.0]), Sampling(), 0) == 1


def test_the_chosen_value_is_the_one_in_the_list() -> None:
    torch.manual_seed(3)
    logits_V = torch.randn(1000) * 5
    token = int(logits_V.argmax())
    found = token_logprobs(logits_V, token, 5)
    assert found.top[0] == (token, found.logprob)
    want = torch.log_softmax(logits_V.double(), 0)
    assert found.logprob == pytest.approx(float(want[token]), abs=1e-5)
    assert [t for t, _ in found.top] == want.topk(5).indices.tolist()
    assert token_logprobs(logits_V, 3, 0).top == ()
