"""Experts spread over ranks with tokens of their own: as if each rank held them all, whoever is chosen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comm.ranks import run_ranks
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.parallel.experts import Experts
from tllm.parallel.shard import shard_of
from tllm.spec.cut import spread

COUNT, WIDTH, HIDDEN, CHOICES = 5, 4, 6, 2
TOKENS = (11, 0, 7, 1)

Case = tuple[Tensor, Tensor, Tensor]


def gated(gate_up_TF: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def build(ep: Group, experts: tuple[int, int] = (0, COUNT)) -> Experts:
    """Filled by the experts' own numbers, so that it does not matter who holds them."""
    made = Experts(spread(experts, ep.size), (0, WIDTH), HIDDEN, "{}.{}".format, gated, ep).double()
    for parameter in (made.gate_up, made.down):
        for local, expert in enumerate(range(*made.holders[ep.rank])):
            dice = torch.Generator().manual_seed(expert)
            parameter.data[local] = torch.randn(parameter.shape[1:], generator=dice, dtype=torch.float64)
    return made.requires_grad_()


def case(rank: int, chosen: int) -> Case:
    """x_TD, weights_TK, experts_TK of a rank whose tokens choose among the first `chosen` experts."""
    dice = torch.Generator().manual_seed(40 + rank)
    x_TD = torch.randn(TOKENS[rank], HIDDEN, generator=dice, dtype=torch.float64)
    weights_TK = torch.rand(TOKENS[rank], CHOICES, generator=dice, dtype=torch.float64)
    experts_TK = torch.rand(TOKENS[rank], chosen, generator=dice).topk(CHOICES, dim=-1).indices
    return x_TD.requires_grad_(), weights_TK.requires_grad_(), experts_TK


def learn(experts: Experts, of_rank: Case) -> tuple[Tensor, Tensor, Tensor]:
    y_TD = experts(*of_rank)
    y_TD.square().sum().backward()
    return y_TD.detach(), of_rank[0].grad, of_rank[1].grad


@pytest.mark.parametrize("chosen", [COUNT, CHOICES], ids=["all", "few"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_it_is_as_if_each_rank_held_all(size: int, chosen: int) -> None:
    """Also where some ranks get no rows at all, and one has none to send."""

    def work(ep: Group) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor, int]:
        experts, gradients = build(ep), []
        for parameter in experts.parameters():
            assert shard_of(parameter).spread
            parameter.register_post_accumulate_grad_hook(gradients.append)
        made = learn(experts, case(ep.rank, chosen))
        return made, experts.gate_up.grad, experts.down.grad, len(gradients)

    whole = build(solo())
    assert not any(shard_of(parameter).spread for parameter in whole.parameters())
    results = run_ranks(local_groups(size), work)
    for rank, (got, *_) in enumerate(results):
        for tensor, want in zip(got, learn(whole, case(rank, chosen)), strict=True):
            torch.testing.assert_close(tensor, want, rtol=1e-13, atol=1e-13)
    for index, parameter in enumerate((whole.gate_up, whole.down), 1):
        together = torch.cat([result[index] for result in results])
        torch.testing.assert_close(together, parameter.grad, rtol=1e-13, atol=1e-13)
    assert [result[3] for result in results] == [2] * size, "each parameter has one gradient, with or without rows"


def test_parts_of_what_is_spread_over_tp_add_up() -> None:
    """Two tp ranks of two replicas: experts 0 and 1 on the first, 2 to 4 on the second, each over both replicas."""
    whole = build(solo())
    parts = []
    for experts in ((0, 2), (2, 5)):

        def work(ep: Group, held: tuple[int, int] = experts) -> tuple[Tensor, Tensor, Tensor]:
            return learn_part(build(ep, held), case(2 * ep.rank, COUNT))

        parts.append(run_ranks(local_groups(2), work))
    for replica in range(2):
        x_TD, weights_TK, experts_TK = case(2 * replica, COUNT)
        want = learn_part(whole, (x_TD, weights_TK, experts_TK))
        for a, b, tensor in zip(parts[0][replica], parts[1][replica], want, strict=True):
            torch.testing.assert_close(a + b, tensor, rtol=1e-13, atol=1e-13)


def learn_part(experts: Experts, of_rank: Case) -> tuple[Tensor, Tensor, Tensor]:
    """As `learn`, with a gradient of the result that does not depend on it."""
    y_TD = experts(*of_rank)
    y_TD.sum().backward()
    return y_TD.detach(), of_rank[0].grad, of_rank[1].grad


def test_without_gradients_nothing_is_recorded_and_numbers_are_the_same() -> None:
    def work(ep: Group) -> tuple[Tensor, Tensor]:
        experts, (x_TD, weights_TK, experts_TK) = build(ep), case(ep.rank, COUNT)
        with torch.no_grad():
            served = experts(x_TD, weights_TK, experts_TK)
        return served, experts(x_TD, weights_TK, experts_TK)

    for served, learned in run_ranks(local_groups(3), work):
        assert not served.requires_grad and torch.equal(served, learned)
