"""Rows to the ranks of their experts and back: who gets what, that backward is the mirror, and how many bytes go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.comm.ranks import run_ranks
from tllm.comm.collectives.group import Group, local_groups
from tllm.parallel.expert_dispatch import Route, combine, dispatch, split_by_expert
from tllm.spec.cut import spread

WIDTH, CHOICES = 6, 3
TOKENS = (15, 0, 9, 1)  # of the ranks, in order
SIZES = (2, 3, 4)


def rows(rank: int, experts: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x_TD, weights_TK, experts_TK of one rank; no token chooses an expert twice."""
    dice = torch.Generator().manual_seed(rank)
    tokens = TOKENS[rank]
    x_TD = torch.randn(tokens, WIDTH, generator=dice, dtype=torch.float64)
    weights_TK = torch.rand(tokens, CHOICES, generator=dice, dtype=torch.float64)
    experts_TK = torch.rand(tokens, experts, generator=dice).topk(CHOICES, dim=-1).indices
    return x_TD.to(dtype), weights_TK.to(dtype), experts_TK


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_each_rank_gets_the_rows_of_its_experts(size: int, dtype: torch.dtype) -> None:
    """512 experts: more than 16-bit floats tell apart."""
    holders = spread((0, 512), size)

    def work(ep: Group) -> tuple[Tensor, Tensor, Tensor]:
        x_TD, weights_TK, experts_TK = rows(ep.rank, 512, dtype)
        return dispatch(x_TD, weights_TK, experts_TK, Route(experts_TK, holders, ep))

    for (first, stop), got in zip(holders, run_ranks(local_groups(size), work), strict=True):
        every = [torch.cat(parts) for parts in zip(*(rows(rank, 512, dtype) for rank in range(size)), strict=True)]
        here = [any(first <= expert < stop for expert in token) for token in every[2].tolist()]
        assert any(here)
        for tensor, want in zip(got, every, strict=True):
            assert tensor.dtype == want.dtype and torch.equal(tensor, want[torch.tensor(here)])


@pytest.mark.parametrize("size", SIZES)
def test_what_comes_back_is_the_sum_and_gradients_go_the_other_way(size: int) -> None:
    """Every rank makes its own function of a row; the truth applies each of them where the row lies."""
    holders = spread((0, 9), size)

    def made(x: Tensor, weights: Tensor, rank: int) -> Tensor:
        return (x * (rank + 2)).tanh() * weights.sum(-1, keepdim=True)

    def leaves(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        x_TD, weights_TK, experts_TK = rows(rank, 9)
        return x_TD.requires_grad_(), weights_TK.requires_grad_(), experts_TK

    def work(ep: Group) -> tuple[Tensor, Tensor, Tensor]:
        x_TD, weights_TK, experts_TK = leaves(ep.rank)
        route = Route(experts_TK, holders, ep)
        x_ND, weights_NK, _ = dispatch(x_TD, weights_TK, experts_TK, route)
        y_TD = combine(made(x_ND, weights_NK, ep.rank), route)
        y_TD.square().sum().backward()
        return y_TD, x_TD.grad, weights_TK.grad

    for rank, got in enumerate(run_ranks(local_groups(size), work)):
        x_TD, weights_TK, experts_TK = leaves(rank)
        y_TD = torch.zeros_like(x_TD)
        for other, (first, stop) in enumerate(holders):
            goes_T1 = ((experts_TK >= first) & (experts_TK < stop)).any(-1, keepdim=True)
            y_TD = y_TD + made(x_TD, weights_TK, other) * goes_T1
        y_TD.square().sum().backward()
        for tensor, want in zip(got, (y_TD, x_TD.grad, weights_TK.grad), strict=True):
            torch.testing.assert_close(tensor, want, rtol=1e-14, atol=1e-14)


def test_a_token_without_an_expert_here_stays_out() -> None:
    """Whole experts are spread over tp as well: some tokens go to no rank of ep at all, and come back as zero."""

    def work(ep: Group) -> tuple[int, Tensor]:
        x_TD, weights_TK, experts_TK = rows(ep.rank, 12)
        route = Route(experts_TK, spread((4, 7), 2), ep)
        x_ND, _, _ = dispatch(x_TD, weights_TK, experts_TK, route)
        return len(x_ND), combine(torch.ones_like(x_ND), route)

    results = run_ranks(local_groups(2), work)
    y_TD = results[0][1]
    held_TK = [[(4 <= expert < 5, 5 <= expert < 7) for expert in token] for token in rows(0, 12)[2].tolist()]
    want = [any(a for a, _ in token) + any(b for _, b in token) for token in held_TK]
    assert y_TD[:, 0].tolist() == want and 0 in want and sum(n for n, _ in results) == sum(want)


def test_each_expert_with_rows_has_a_part_and_without_any_the_first_has_none() -> None:
    x_ND = torch.randn(3, 2)
    parts = split_by_expert(x_ND, torch.tensor([0, 0, 2, 2, 3]))
    assert [(number, part.tolist()) for number, part in parts] == [(1, x_ND[:2].tolist()), (3, x_ND[2:].tolist())]
    assert [(number, len(part)) for number, part in split_by_expert(x_ND[:0], torch.zeros(5).long())] == [(0, 0)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_those_of_the_formula(size: int, dtype: torch.dtype) -> None:
    holders = spread((0, 9), size)

    def work(ep: Group) -> tuple[int, int, int]:
        x_TD, weights_TK, experts_TK = rows(ep.rank, 9, dtype)
        route = Route(experts_TK, holders, ep)
        x_ND, weights_NK, _ = dispatch(x_TD.requires_grad_(), weights_TK.requires_grad_(), experts_TK, route)
        combine(x_ND * weights_NK.sum(-1, keepdim=True), route).sum().backward()
        go = sum(len(places) for peer, places in enumerate(route.places) if peer != ep.rank)
        come = sum(route.counts) - route.counts[ep.rank]
        return sum(link.bytes_moved for link in ep.send.values()), go, come

    for moved, go, come in run_ranks(local_groups(size), work):
        forward = (go * (WIDTH + 2 * CHOICES) + come * WIDTH) * dtype.itemsize
        backward = (go * WIDTH + come * (WIDTH + CHOICES)) * dtype.itemsize
        assert moved == forward + backward + 8 * (size - 1)
