"""The most likely tokens over a cut vocabulary, against a sort of the whole one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.comm.ranks import run_ranks
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.parallel.top_log_probs import top_log_probs
from tllm.spec.cut import proportional

V, T = 53, 9


@pytest.mark.parametrize("shares", [(1,), (1, 1), (1, 30, 1), (1,) * 7])
@pytest.mark.parametrize("k", [1, 6, 40, V - 1])
def test_equals_a_sort_of_the_whole_vocabulary(k: int, shares: tuple[int, ...]) -> None:
    logits_TV = torch.randn(T, V, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 4
    want_TV, order_TV = logits_TV.log_softmax(-1).sort(-1, descending=True)
    vocabs = proportional(V, shares, "vocabulary")

    def work(tp: Group) -> tuple[Tensor, Tensor]:
        return top_log_probs(logits_TV[:, slice(*vocabs[tp.rank])].clone(), k, vocabs[tp.rank], tp)

    for ids_TK, log_p_TB in run_ranks(local_groups(len(shares)), work):
        assert torch.equal(ids_TK, order_TV[:, :k])
        torch.testing.assert_close(log_p_TB[:, :-1], want_TV[:, :k], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(log_p_TB[:, -1], want_TV[:, k:].logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_a_rest_below_the_rounding_of_one_is_still_exact() -> None:
    logits_TV = torch.tensor([[90.0, 0.0, -1.0]])
    _, log_p_TB = top_log_probs(logits_TV.clone(), 1, (0, 3), solo())
    assert float(log_p_TB[0, 1]) == pytest.approx(math.log(1 + math.exp(-1)) - 90, abs=1e-5)
