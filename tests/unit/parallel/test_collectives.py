"""The differentiable collectives: values and gradients against the same sums written on one rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.comm.ranks import run_ranks
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.parallel.collectives import copy_to, gather_rows, reduce_from, scatter_rows
from tllm.parallel.sequence_parallel import slice_counts

SIZES = (2, 3, 5)


def value(rank: int, rows: int = 7) -> Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def weight(rank: int, rows: int = 7) -> Tensor:
    return value(100 + rank, rows)


@pytest.mark.parametrize("size", SIZES)
def test_copy_to_sums_gradients(size: int) -> None:
    x = value(0)

    def work(tp: Group) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        out = copy_to(leaf, tp)
        (gradient,) = torch.autograd.grad((out * weight(tp.rank)).sum() + leaf.sum(), leaf)
        return out, gradient

    for out, gradient in run_ranks(local_groups(size), work):
        assert torch.equal(out, x)
        torch.testing.assert_close(gradient, sum(weight(r) for r in range(size)) + 1)


@pytest.mark.parametrize("size", SIZES)
def test_reduce_from_sums_values_and_leaves_what_autograd_needs(size: int) -> None:
    def work(tp: Group) -> tuple[Tensor, Tensor, Tensor]:
        leaf = value(tp.rank).requires_grad_()
        y = leaf.exp()  # its backward reads its own result: a sum made in place would spoil it
        out = reduce_from(y, tp)
        (gradient,) = torch.autograd.grad((out * weight(0)).sum(), leaf)
        return out, y, gradient

    want = sum(value(r).exp() for r in range(size))
    for rank, (out, y, gradient) in enumerate(run_ranks(local_groups(size), work)):
        torch.testing.assert_close(out, want)
        assert torch.equal(y, value(rank).exp())
        torch.testing.assert_close(gradient, weight(0) * value(rank).exp())


@pytest.mark.parametrize("rows", [1, 7, 11])
@pytest.mark.parametrize("size", SIZES)
def test_rows_are_gathered_and_scattered(size: int, rows: int) -> None:
    """gather then scatter: every rank has all rows, the sum of what all make of them comes back in slices."""
    counts = slice_counts(rows, size)
    whole = value(0, rows)
    slices = whole.split(counts)

    def work(tp: Group) -> tuple[Tensor, Tensor, Tensor]:
        leaf = slices[tp.rank].clone().requires_grad_()
        every = gather_rows(leaf, tp, counts)
        back = scatter_rows(every * weight(tp.rank, rows), tp, counts)
        (gradient,) = torch.autograd.grad((back * slices[tp.rank]).sum(), leaf)
        return every, back, gradient

    factor = sum(weight(r, rows) for r in range(size))
    results = run_ranks(local_groups(size), work)
    assert all(torch.equal(every, whole) for every, _, _ in results)
    torch.testing.assert_close(torch.cat([back for _, back, _ in results]), whole * factor)
    torch.testing.assert_close(torch.cat([gradient for _, _, gradient in results]), whole * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_slices_of_a_sum_have_the_bits_of_the_sum(size: int, dtype: torch.dtype) -> None:
    counts = slice_counts(7, size)

    def work(tp: Group) -> tuple[Tensor, Tensor]:
        mine = value(tp.rank).to(dtype)
        part = scatter_rows(mine.clone(), tp, counts)
        return part, reduce_from(mine.clone(), tp)

    results = run_ranks(local_groups(size), work)
    assert torch.equal(torch.cat([part for part, _ in results]), results[0][1])


def test_scatter_leaves_its_input() -> None:
    def work(tp: Group) -> bool:
        mine = value(tp.rank)
        scatter_rows(mine, tp, slice_counts(7, 3))
        return torch.equal(mine, value(tp.rank))

    assert all(run_ranks(local_groups(3), work))


def test_a_group_of_one_gives_back_its_input() -> None:
    x, tp = value(0).requires_grad_(), solo()
    assert copy_to(x, tp) is x and reduce_from(x, tp) is x
    assert gather_rows(x, tp, [7]) is x and scatter_rows(x, tp, [7]) is x


def test_without_a_gradient_nothing_is_copied() -> None:
    def work(tp: Group) -> bool:
        x = value(tp.rank)
        return copy_to(x, tp) is x and reduce_from(x, tp) is x

    assert all(run_ranks(local_groups(2), work))


@pytest.mark.parametrize(("tokens", "ranks", "counts"), [(7, 3, [2, 2, 3]), (1, 3, [0, 0, 1]), (6, 2, [3, 3])])
def test_slices_share_out_every_token(tokens: int, ranks: int, counts: list[int]) -> None:
    assert slice_counts(tokens, ranks) == counts
