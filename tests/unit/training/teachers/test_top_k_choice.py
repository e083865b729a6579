"""What is lost of a teacher's distribution by sending its likeliest tokens, and how few of them hold a budget."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.unit.parallel.test_divergence import buckets
from tllm.training.teachers.top_k_choice import entropy, fewest_within, lost_by_count

VOCAB, K = 37, 7


def slowly_lost(p_V: list[float], k: int) -> float:
    """KL(p || p') by its definition, a token at a time; p' has the first k tokens, and the others' mass shared out."""
    order = sorted(range(len(p_V)), key=lambda i: -p_V[i])
    rest = math.fsum(p_V[i] for i in order[k:])
    told = [p_V[i] if place < k else rest / (len(p_V) - k) for place, i in enumerate(order)]
    return math.fsum(p_V[i] * math.log(p_V[i] / q) for i, q in zip(order, told, strict=True) if p_V[i])


def lost_of(logits_PV: Tensor, k: int) -> Tensor:
    log_p_PV = logits_PV.log_softmax(-1)
    ids_PK = log_p_PV.topk(k).indices
    rest_PV = logits_PV.scatter(-1, ids_PK, -math.inf)
    return lost_by_count(buckets(log_p_PV, ids_PK), entropy(rest_PV), logits_PV.shape[-1])


def logits(places: int, scale: float, seed: int = 1) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(places, VOCAB, generator=dice, dtype=torch.float64) * scale


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 40.0])
def test_it_is_the_definition_and_falls_with_every_token(scale: float) -> None:
    logits_PV = logits(9, scale)
    lost_PK = lost_of(logits_PV, K)
    want = [[slowly_lost(p_V, k) for k in range(1, K + 1)] for p_V in logits_PV.softmax(-1).tolist()]
    torch.testing.assert_close(lost_PK, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-14)
    assert bool((lost_PK.diff(dim=-1) <= 1e-14).all())


def test_of_all_but_one_nothing_is_lost_and_of_a_token_without_probability_neither() -> None:
    assert float(lost_of(logits(3, 2.0), VOCAB - 1)[:, -1].abs().max()) == 0
    sure_PV = torch.full((1, VOCAB), -torch.inf, dtype=torch.float64)
    sure_PV[0, 5] = 0.0
    assert lost_by_count(torch.tensor([[0.0, -torch.inf]]), torch.zeros(1, dtype=torch.float64), VOCAB).tolist() == [
        [0]
    ]


@pytest.mark.parametrize("budget", [0.01, 0.05, 0.2, 0.5])
def test_no_other_choice_of_as_few_tokens_loses_less(budget: float) -> None:
    """Of all choices, counted one by one."""
    lost_PK = lost_of(torch.cat((logits(3, 2.0), logits(2, 4.0, seed=2))), 5)
    counts_P = fewest_within(lost_PK, budget)
    assert counts_P.shape == (5,) and counts_P.min() >= 1
    mean = float(lost_PK.gather(-1, counts_P[:, None] - 1).mean())
    assert mean <= budget or counts_P.tolist() == [5] * 5
    total = int(counts_P.sum())
    for other in itertools.product(range(1, 6), repeat=5):
        if sum(other) <= total:
            assert float(lost_PK.gather(-1, torch.tensor(other)[:, None] - 1).mean()) >= mean - 1e-15


def test_one_count_for_every_place_or_a_budget_for_each_takes_more_tokens() -> None:
    lost_PK = lost_of(torch.cat([logits(20, scale) for scale in (1.0, 3.0, 6.0)]), 30)
    budget = 0.1
    chosen = int(fewest_within(lost_PK, budget).sum())
    alike = len(lost_PK) * (1 + next(k for k in range(30) if lost_PK[:, k].mean() <= budget))
    each = int(((lost_PK > budget).sum(-1) + 1).sum())
    print({"one price": chosen, "one count for all": alike, "a budget for each": each})
    assert chosen < min(each, alike)


def test_a_budget_that_is_never_reached_and_one_that_always_is() -> None:
    lost_PK = lost_of(logits(4, 1.0), 5)
    assert fewest_within(lost_PK, 1e-6).tolist() == [5] * 4
    assert fewest_within(lost_PK, 10.0).tolist() == [1] * 4
