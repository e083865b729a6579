"""Losses of pairs where a model is as sure as its numbers can be."""

from __future__ import annotations

import pytest
import torch

from tllm.training.job.preference_tables import ORPOConfig
from tllm.training.objectives.pair_losses import ORPOPairs
from tllm.training.objectives.reply_log_probs import Pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sure", ["chosen", "rejected"])
def test_a_reply_that_is_certain_has_a_loss_and_a_gradient(sure: str, dtype: torch.dtype) -> None:
    """Its log-probability is rounded to 0, and that of everything else would be log 0."""
    other = torch.tensor([-3.0], dtype=dtype)
    log_p_2 = torch.stack([torch.zeros_like(other), other]).requires_grad_()
    chosen_P, rejected_P = log_p_2 if sure == "chosen" else log_p_2.flip(0)
    ones_P, zeros_P = torch.ones_like(other), torch.zeros_like(other)
    found = ORPOPairs(ORPOConfig(beta=0.5))(Pairs(chosen_P, rejected_P, ones_P, ones_P, zeros_P, zeros_P))
    found.losses_P.sum().backward()
    assert log_p_2.grad is not None and torch.isfinite(log_p_2.grad).all() and torch.isfinite(found.losses_P).all()
    odds = found.more["log_odds_chosen"]
    assert (odds > 10).all() if sure == "chosen" else (odds < -10).all()


def test_the_odds_of_other_replies_are_as_they_were() -> None:
    chosen_P, rejected_P, ones_P = torch.tensor([-1e-3, -1.0]), torch.tensor([-3.0, -1e-6]), torch.ones(2)
    found = ORPOPairs(ORPOConfig())(Pairs(chosen_P, rejected_P, ones_P, ones_P, 0 * ones_P, 0 * ones_P))
    odds = [x_P.double().exp() / -torch.expm1(x_P.double()) for x_P in (chosen_P, rejected_P)]
    torch.testing.assert_close(found.more["log_odds_chosen"].double(), (odds[0] / odds[1]).log(), rtol=1e-6, atol=0)
