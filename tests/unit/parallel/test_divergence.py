"""Divergences over a cut vocabulary against plain torch over the whole one; and what a top-k with the rest misses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.comm.ranks import run_ranks
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.core.errors import ConfigError
from tllm.parallel.cross_entropy import IGNORED, cross_entropy, measured_cross_entropy
from tllm.parallel.divergence import NO_TOKEN, divergence_over_all, divergence_over_top
from tllm.spec.cut import proportional

V, T = 101, 24
SHARES = ((1,), (1, 1), (1, 40, 1), (1,) * 5)
BETAS = (0.0, 1.0, 0.5, 0.1)


def problem(scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a student, log-probabilities of a teacher, and a gradient for each token; float64."""
    chance = torch.Generator().manual_seed(11)
    logits_TV, of_teacher_TV = torch.randn(2, T, V, generator=chance, dtype=torch.float64).mul_(scale).unbind()
    return logits_TV, of_teacher_TV.log_softmax(-1), torch.randn(T, generator=chance, dtype=torch.float64)


def buckets(log_TV: Tensor, ids_TK: Tensor) -> Tensor:
    """The log-probabilities of the K tokens and of all others together, [T, K + 1]."""
    rest_TV = log_TV.scatter(-1, ids_TK, -math.inf)
    return torch.cat((log_TV.gather(-1, ids_TK), rest_TV.logsumexp(-1, keepdim=True)), -1)


def plain(log_p_TB: Tensor, log_q_TB: Tensor, beta: float) -> Tensor:
    """The definition, by probabilities."""
    p_TB, q_TB = log_p_TB.exp(), log_q_TB.exp()
    if beta in (0, 1):
        first, second = (log_p_TB, log_q_TB) if beta == 0 else (log_q_TB, log_p_TB)
        return (first.exp() * (first - second)).sum(-1)
    log_m_TB = (beta * p_TB + (1 - beta) * q_TB).log()
    return beta * (p_TB * (log_p_TB - log_m_TB)).sum(-1) + (1 - beta) * (q_TB * (log_q_TB - log_m_TB)).sum(-1)


def truth(beta: float, k: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Divergences and the gradient of the whole logits; with k = 0 over all tokens."""
    logits_TV, log_p_TV, weight_T = problem(scale)
    leaf = logits_TV.requires_grad_()
    log_q_TV = leaf.log_softmax(-1)
    if k:
        ids_TK = log_p_TV.topk(k).indices
        log_p_TV, log_q_TV = buckets(log_p_TV, ids_TK), buckets(log_q_TV, ids_TK)
    divergence_T = plain(log_p_TV, log_q_TV, beta)
    return divergence_T.detach(), torch.autograd.grad((divergence_T * weight_T).sum(), leaf)[0]


def cut(
    beta: float, k: int, shares: tuple[int, ...], dtype: torch.dtype = torch.float64, scale: float = 3.0
) -> tuple[Tensor, Tensor]:
    logits_TV, log_p_TV, weight_T = (x.to(dtype) for x in problem(scale))
    vocabs = proportional(V, shares, "vocabulary")
    ids_TK = log_p_TV.topk(k).indices if k else torch.zeros(T, 0)
    log_p_TB = buckets(log_p_TV, ids_TK) if k else log_p_TV

    def work(tp: Group) -> tuple[Tensor, Tensor]:
        vocab = vocabs[tp.rank]
        leaf = logits_TV[:, slice(*vocab)].clone().requires_grad_()
        mine = leaf * 1.0  # what a leaf holds is not to be changed
        if k:
            divergence_T = divergence_over_top(mine, ids_TK.int(), log_p_TB, vocab, tp, beta)
        else:
            divergence_T = divergence_over_all(mine, log_p_TB[:, slice(*vocab)], tp, beta)
        return divergence_T.detach(), torch.autograd.grad((divergence_T * weight_T).sum(), leaf)[0]

    results = run_ranks(local_groups(len(shares)), work)
    assert all(torch.equal(results[0][0], one) for one, _ in results), "ranks must agree to the bit"
    return results[0][0], torch.cat([gradient for _, gradient in results], dim=-1)


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("k", [0, 1, 7, V - 1])
@pytest.mark.parametrize("beta", BETAS)
def test_equals_the_definition_over_the_whole_vocabulary(beta: float, k: int, shares: tuple[int, ...]) -> None:
    want, got = truth(beta, k), cut(beta, k, shares)
    torch.testing.assert_close(got[0], want[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got[1], want[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("k", [0, 7])
@pytest.mark.parametrize("beta", BETAS)
def test_float32_is_as_near_as_float32_can_be(beta: float, k: int) -> None:
    want, got = truth(beta, k), cut(beta, k, (1, 2, 1), torch.float32)
    assert got[0].dtype == torch.float32
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-6, atol=1e-6)


def test_a_rest_that_float32_cannot_hold_as_a_probability_has_a_finite_loss_and_gradient() -> None:
    logits_TV = torch.tensor([[200.0, 0.0, -1.0, 3.0]])
    log_p_T2 = torch.tensor([[0.5, 0.5]]).log()
    leaf = logits_TV.clone().requires_grad_()
    loss_T = divergence_over_top(leaf * 1.0, torch.tensor([[0]], dtype=torch.int32), log_p_T2, (0, 4), solo(), 0.0)
    (gradient_TV,) = torch.autograd.grad(loss_T.sum(), leaf)
    rest = torch.tensor([0.0, -1.0, 3.0], dtype=torch.float64)
    want = math.log(0.5) - 0.5 * (float(rest.logsumexp(0)) - 200)
    assert float(loss_T.detach()) == pytest.approx(want, rel=1e-6)
    torch.testing.assert_close(gradient_TV[0, 1:].double(), -0.5 * rest.softmax(0), rtol=1e-5, atol=1e-7)
    assert float(gradient_TV[0, 0]) == pytest.approx(0.5)


@pytest.mark.parametrize("beta", BETAS)
def test_buckets_are_never_further_apart_than_all_tokens(beta: float) -> None:
    """Data processing: putting outcomes together can only hide a difference, and hides less with a larger k."""
    whole_T, _ = cut(beta, 0, (1,))
    found = [cut(beta, k, (1,))[0] for k in (1, 2, 4, 8, 16, 32, 64, V - 1)]
    for less_T, more_T in zip(found, [*found[1:], whole_T], strict=True):
        assert bool((less_T <= more_T + 1e-12).all())
    assert float((whole_T - found[0]).max()) > 0.1, "the teacher's tail has something to miss"


@pytest.mark.parametrize("k", [1, 8, 64])
def test_what_the_buckets_lack_of_the_forward_kl_is_what_lies_within_the_rest(k: int) -> None:
    """KL(p || q) = KL of the buckets + p(rest) KL(p given rest || q given rest), the chain rule."""
    logits_TV, log_p_TV, _ = problem()
    inside_TV = torch.zeros(T, V, dtype=torch.bool).scatter(-1, log_p_TV.topk(k).indices, True)
    given_p_TV, given_q_TV = (x.masked_fill(inside_TV, -1e9).log_softmax(-1) for x in (log_p_TV, logits_TV))
    within_T = plain(given_p_TV, given_q_TV, 0.0)
    mass_T = log_p_TV.exp().masked_fill(inside_TV, 0).sum(-1)
    lacking_T = cut(0.0, 0, (1,))[0] - cut(0.0, k, (1, 1))[0]
    torch.testing.assert_close(lacking_T, mass_T * within_T, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shares", [(1,), (1, 40, 1)])
@pytest.mark.parametrize("beta", BETAS)
def test_places_without_a_token_are_as_if_they_were_not_there(beta: float, shares: tuple[int, ...]) -> None:
    """Tokens of unlike k in one matrix: each has the divergence and the gradient that it has with its own k alone."""
    logits_TV, log_p_TV, weight_T = problem()
    counts_T = torch.arange(T) % 7 + 1
    ids_TK = log_p_TV.topk(7).indices.masked_fill(torch.arange(7) >= counts_T[:, None], NO_TOKEN)
    log_p_TB = torch.full((T, 8), -math.inf, dtype=torch.float64)
    want_T, want_TV = torch.zeros(T, dtype=torch.float64), torch.zeros(T, V, dtype=torch.float64)
    for k in range(1, 8):
        of_k = counts_T == k
        of_buckets_TB = buckets(log_p_TV, log_p_TV.topk(k).indices)[of_k]
        log_p_TB[of_k, :k], log_p_TB[of_k, -1] = of_buckets_TB[:, :k], of_buckets_TB[:, k]
        want_T[of_k], want_TV[of_k] = (x[of_k] for x in truth(beta, k))
    vocabs = proportional(V, shares, "vocabulary")

    def work(tp: Group) -> tuple[Tensor, Tensor]:
        leaf = logits_TV[:, slice(*vocabs[tp.rank])].clone().requires_grad_()
        divergence_T = divergence_over_top(leaf * 1.0, ids_TK.int(), log_p_TB, vocabs[tp.rank], tp, beta)
        return divergence_T.detach(), torch.autograd.grad((divergence_T * weight_T).sum(), leaf)[0]

    results = run_ranks(local_groups(len(shares)), work)
    torch.testing.assert_close(results[0][0], want_T, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([one for _, one in results], -1), want_TV, rtol=1e-10, atol=1e-12)


def test_a_token_that_no_rank_has_is_refused() -> None:
    logits_TV, ids_TK = torch.zeros(1, 4), torch.tensor([[2, 4]], dtype=torch.int32)
    with pytest.raises(ConfigError, match="token 4 of the teacher is outside the student's vocabulary"):
        divergence_over_top(logits_TV, ids_TK, torch.zeros(1, 3), (0, 4), solo(), 0.0)


@pytest.mark.parametrize("shares", SHARES)
def test_a_measured_cross_entropy_is_the_learned_one_and_leaves_the_logits(shares: tuple[int, ...]) -> None:
    logits_TV, _, _ = problem()
    labels_T = torch.arange(T) * 4
    labels_T[3] = IGNORED
    vocabs = proportional(V, shares, "vocabulary")

    def work(tp: Group) -> None:
        vocab = vocabs[tp.rank]
        mine_TV = logits_TV[:, slice(*vocab)].clone()
        measured_T = measured_cross_entropy(mine_TV, labels_T, vocab, tp)
        assert torch.equal(mine_TV, logits_TV[:, slice(*vocab)])
        torch.testing.assert_close(measured_T, cross_entropy(mine_TV, labels_T, vocab, tp), rtol=1e-12, atol=1e-13)

    run_ranks(local_groups(len(shares)), work)


def test_no_token_at_all_has_a_gradient_of_nothing() -> None:
    leaf = torch.zeros(0, V, requires_grad=True)
    top_T = divergence_over_top(leaf * 1.0, torch.zeros(0, 2).int(), torch.zeros(0, 3), (0, V), solo(), 0.5)
    all_T = divergence_over_all(leaf * 1.0, torch.zeros(0, V), solo(), 1.0)
    (gradient_TV,) = torch.autograd.grad(top_T.sum() + all_T.sum(), leaf)
    assert gradient_TV.shape == (0, V) and not len(measured_cross_entropy(leaf, torch.arange(0), (0, V), solo()))
