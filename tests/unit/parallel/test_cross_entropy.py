"""Cross-entropy over a cut vocabulary against torch's over the whole one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comm.ranks import run_ranks
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.core.errors import ConfigError
from tllm.parallel.cross_entropy import IGNORED, check_labels, cross_entropy
from tllm.spec.cut import proportional

V = 101
SHARES = ((1, 1), (1, 2, 1), (1,) * 5, (1, 40, 1))


def problem(dtype: torch.dtype, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(5)
    logits_TV = (torch.randn(40, V, generator=chance, dtype=torch.float64) * scale).to(dtype)
    labels_T = torch.randint(0, V, (40,), generator=chance)
    labels_T[:4] = torch.tensor([0, V - 1, IGNORED, IGNORED])
    return logits_TV, labels_T, torch.randn(40, generator=chance, dtype=torch.float64).to(dtype)


def truth(logits_TV: Tensor, labels_T: Tensor, weight_T: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits_TV.double().requires_grad_()
    loss_T = F.cross_entropy(leaf, labels_T, reduction="none", ignore_index=IGNORED)
    return loss_T.detach(), torch.autograd.grad((loss_T * weight_T).sum(), leaf)[0]


def cut(logits_TV: Tensor, labels_T: Tensor, weight_T: Tensor, shares: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    vocabs = proportional(V, shares, "vocabulary")

    def work(tp: Group) -> tuple[Tensor, Tensor]:
        start, stop = vocabs[tp.rank]
        leaf = logits_TV[:, start:stop].clone().requires_grad_()
        loss_T = cross_entropy(leaf, labels_T, vocabs[tp.rank], tp)
        return loss_T.detach(), torch.autograd.grad((loss_T * weight_T).sum(), leaf)[0]

    results = run_ranks(local_groups(len(shares)), work)
    assert all(torch.equal(results[0][0], loss_T) for loss_T, _ in results), "ranks must agree to the bit"
    return results[0][0], torch.cat([gradient for _, gradient in results], dim=-1)


@pytest.mark.parametrize("shares", SHARES)
def test_equals_the_whole_vocabulary(shares: tuple[int, ...]) -> None:
    given = problem(torch.float64)
    want, got = truth(*given), cut(*given, shares)
    torch.testing.assert_close(got[0], want[0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(got[1], want[1], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("scale", [3.0, 300.0])
def test_float32_and_logits_whose_exponential_overflows(scale: float) -> None:
    given = problem(torch.float32, scale)
    want, got = truth(*given), cut(*given, (1, 2, 1))
    assert got[0].dtype == torch.float32
    torch.testing.assert_close(got[0].double(), want[0], rtol=3e-7, atol=3e-6)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-6)


def test_ignored_tokens_have_no_loss_and_no_gradient() -> None:
    loss_T, gradient_TV = cut(*problem(torch.float64), (1, 1))
    assert loss_T[2:4].tolist() == [0, 0]
    assert not gradient_TV[2:4].any() and gradient_TV[4:].any()


@pytest.mark.parametrize("count", [0, 1])
def test_few_tokens_or_none(count: int) -> None:
    given = problem(torch.float64)
    want, got = truth(*(x[:count] for x in given)), cut(*(x[:count] for x in given), (1, 2, 1))
    torch.testing.assert_close(got[0], want[0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(got[1], want[1], rtol=1e-13, atol=1e-14)


def test_nobody_learns_a_label_outside_the_vocabulary() -> None:
    logits_TV, labels_T, weight_T = problem(torch.float64)
    labels_T[7] = V
    with pytest.raises(ConfigError, match="label 101 is outside"):
        cut(logits_TV, labels_T, weight_T, (1, 1))
    with pytest.raises(ConfigError, match="label 101 is outside"):
        cross_entropy(logits_TV, labels_T, (0, V), solo())


def test_labels_that_are_asked_at_the_host() -> None:
    check_labels(torch.tensor([IGNORED, 0, 9]), 10)
    with pytest.raises(ConfigError, match="label 10 is outside"):
        check_labels(torch.tensor([3, 10]), 10)


def test_one_rank_equals_torch() -> None:
    given = problem(torch.float64)
    want, got = truth(*given), cut(*given, (1,))
    torch.testing.assert_close(got[0], want[0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(got[1], want[1], rtol=1e-13, atol=1e-14)


def test_a_loss_near_nothing_keeps_its_digits() -> None:
    """Of a label whose logit is far above all others: no difference of large numbers is left over."""
    logits_TV = torch.zeros(1, V, dtype=torch.float32)
    logits_TV[0, 3] = 300.0
    assert float(cross_entropy(logits_TV, torch.tensor([3]), (0, V), solo())) == 0.0


@pytest.mark.parametrize("tokens", [V, 0])
def test_logits_are_not_copied(tokens: int) -> None:
    """What comes back is where the logits lay, which a second backward pass would spoil: torch refuses it."""
    leaf = torch.randn(tokens, V, dtype=torch.float64).requires_grad_()
    place = leaf.data_ptr()
    loss = cross_entropy(leaf, torch.zeros(tokens, dtype=torch.int64), (0, V), solo()).sum()
    (gradient_TV,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    assert gradient_TV.data_ptr() == place and not gradient_TV.requires_grad
    with pytest.raises(RuntimeError, match="inplace operation"):
        torch.autograd.grad(loss, leaf)
