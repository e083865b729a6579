"""Which algorithm is chosen, and the order and width of the sums."""

from __future__ import annotations

import math

import pytest
import torch

from tllm.comm.collectives.all_reduce import one_shot_limit
from tllm.comm.collectives.fold import fold


def test_two_ranks_always_go_one_shot() -> None:
    assert one_shot_limit(2) == math.inf


@pytest.mark.parametrize("size", [3, 4, 8])
def test_the_limit_is_where_both_cost_the_same(size: int) -> None:
    latency_bytes = 1000.0
    length = one_shot_limit(size, latency_bytes)
    one = latency_bytes + (size - 1) * length
    two = 2 * latency_bytes + 2 * (size - 1) / size * length
    assert one == pytest.approx(two)


def tree_all_reduce(pieces: list[torch.Tensor]) -> torch.Tensor:
    """The sum, neighbours first: of 5 pieces ((0 + 1) + (2 + 3)) + 4."""
    while len(pieces) > 1:
        paired = [a + b for a, b in zip(pieces[::2], pieces[1::2], strict=False)]
        pieces = paired + pieces[len(paired) * 2 :]
    return pieces[0]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 9, 16])
def test_every_rank_makes_the_same_tree(size: int) -> None:
    torch.manual_seed(size)
    pieces = [torch.randn(1000) for _ in range(size)]
    want = tree_all_reduce(pieces)
    for mine in range(size):
        copies = [piece.clone() for piece in pieces]
        fold(copies, copies[mine])
        assert torch.equal(copies[mine], want)
    if size > 3:
        assert not torch.equal(want, sum(pieces)), "another order gives other bits"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8])
def test_16_bit_floats_are_rounded_once(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    pieces = [torch.randn(1000).to(dtype) for _ in range(size)]
    exact = tree_all_reduce([piece.float() for piece in pieces])
    fold(pieces, pieces[-1])
    assert torch.equal(pieces[-1], exact.to(dtype))
