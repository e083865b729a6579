"""The load-balance loss: that of `transformers`, once whatever the ranks and however often a pass is made again."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.support.comm.ranks import run_ranks
from tllm.comm.collectives.group import Group, local_groups
from tllm.parallel.load_balance import LoadBalance

TOKENS, EXPERTS, CHOICES = 23, 7, 3


def logits(seed: int = 0) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(TOKENS, EXPERTS, generator=dice, dtype=torch.float64)).requires_grad_()


def route(balance: LoadBalance, logits_TE: Tensor) -> Tensor:
    probabilities_TE = logits_TE.softmax(-1)
    weights_TK, experts_TK = probabilities_TE.topk(CHOICES, dim=-1)
    return balance.apply("gate", weights_TK, probabilities_TE, experts_TK)


def learned(balance: LoadBalance, logits_TE: Tensor) -> Tensor:
    """The gradient that the loss alone gives."""
    (gradient,) = torch.autograd.grad(route(balance, logits_TE).sum() * 0, logits_TE)
    return gradient


def test_it_is_the_loss_of_transformers() -> None:
    ours, theirs = logits(), logits()
    balance = LoadBalance(0.02, layers=1)
    want = load_balancing_loss_func((theirs,), EXPERTS, CHOICES)
    (of_theirs,) = torch.autograd.grad(0.02 * want, theirs)
    torch.testing.assert_close(learned(balance, ours), of_theirs, rtol=1e-6, atol=1e-9)  # theirs is in float32
    assert balance.mean == pytest.approx(want.item(), rel=1e-6)


def test_alike_experts_cost_k_and_a_chosen_few_e() -> None:
    balance = LoadBalance(1.0, layers=1)
    shifted_TE = torch.stack([torch.arange(EXPERTS, dtype=torch.float64).roll(shift) for shift in range(EXPERTS)])
    learned(balance, shifted_TE.requires_grad_())
    assert balance.mean == pytest.approx(CHOICES)
    assert balance.loads()["gate"].tolist() == [CHOICES] * EXPERTS
    balance.begin(1)
    learned(balance, (100.0 * torch.eye(EXPERTS, dtype=torch.float64)[:1].expand(9, -1)).clone().requires_grad_())
    assert balance.mean == pytest.approx(EXPERTS)


def test_it_is_a_mean_over_microbatches_and_layers() -> None:
    balance = LoadBalance(0.5, layers=3)
    balance.begin(0)  # as where no completion is good enough to be learned
    assert balance.mean == 0
    balance.begin(4)
    gradient, alone = learned(balance, logits()), learned(LoadBalance(0.5, layers=1), logits())
    torch.testing.assert_close(gradient, alone / 12, rtol=1e-13, atol=1e-17)
    learned(balance, logits(1))
    means = []
    for seed in (0, 1):
        one = LoadBalance(0.0, layers=1)
        learned(one, logits(seed))
        means.append(one.mean)
    assert balance.mean == pytest.approx(sum(means) / 12, rel=1e-14)
    assert int(balance.loads()["gate"].sum()) == 2 * TOKENS * CHOICES
    balance.begin(4)
    assert balance.mean == 0 and not balance.loads()


def test_the_first_of_the_ranks_that_route_alike_learns_for_all() -> None:
    def work(tp: Group) -> tuple[Tensor, float]:
        balance = LoadBalance(0.1, layers=1, tp=tp)
        leaf = logits()
        (gradient,) = torch.autograd.grad(route(balance, leaf).square().sum(), leaf)
        return gradient, balance.mean

    results = run_ranks(local_groups(3), work)
    plain = logits()
    (of_weights,) = torch.autograd.grad(plain.softmax(-1).topk(CHOICES, dim=-1).values.square().sum(), plain)
    one = LoadBalance(0.1, layers=1)
    want = learned(one, logits())
    torch.testing.assert_close(results[0][0], of_weights + want, rtol=1e-13, atol=1e-15)
    assert all(torch.equal(gradient, of_weights) for gradient, _ in results[1:])
    assert [mean for _, mean in results] == [one.mean, 0, 0]


def test_ranks_with_parts_of_a_microbatch_count_together() -> None:
    parts = (4, 0, 19)

    def work(cp: Group) -> tuple[Tensor, float, Tensor]:
        balance = LoadBalance(0.1, layers=1, cp=cp)
        mine = logits().detach().split(parts)[cp.rank].clone().requires_grad_()
        return learned(balance, mine), balance.mean, balance.loads()["gate"]

    results = run_ranks(local_groups(3), work)
    whole = LoadBalance(0.1, layers=1)
    torch.testing.assert_close(torch.cat([g for g, _, _ in results]), learned(whole, logits()), rtol=1e-13, atol=1e-17)
    assert sum(mean for _, mean, _ in results) == pytest.approx(whole.mean, rel=1e-13)
    assert torch.equal(sum(chosen for _, _, chosen in results), whole.loads()["gate"])


def test_a_pass_made_again_counts_once() -> None:
    def squared(balance: LoadBalance, logits_TE: Tensor) -> Tensor:
        return route(balance, logits_TE).square()  # keeps what it is given: the second pass goes as far as here

    again, once = LoadBalance(0.1, layers=1), LoadBalance(0.1, layers=1)
    leaf = logits()
    (gradient,) = torch.autograd.grad(checkpoint(partial(squared, again), leaf, use_reentrant=False).sum(), leaf)
    (want,) = torch.autograd.grad(squared(once, leaf).sum(), leaf)
    assert torch.equal(gradient, want)
    assert again.mean == once.mean and torch.equal(again.loads()["gate"], once.loads()["gate"])


def test_nothing_is_counted_where_nothing_is_learned() -> None:
    balance = LoadBalance(0.1, layers=1)
    with torch.no_grad():
        route(balance, logits())
    assert balance.mean == 0 and not balance.loads()
