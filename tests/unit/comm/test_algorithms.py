"""Which algorithm is chosen, and the order and width of the sums."""

from __future__ import annotations

import math

import pytest
import torch

from tllm.comm.algorithms import add_in_order, one_shot_limit


def test_two_ranks_always_go_one_shot() -> None:
    assert one_shot_limit(2) == math.inf


@pytest.mark.parametrize("size", [3, 4, 8])
def test_the_limit_is_where_both_cost_the_same(size: int) -> None:
    latency_bytes = 1000.0
    length = one_shot_limit(size, latency_bytes)
    one = latency_bytes + (size - 1) * length
    two = 2 * latency_bytes + 2 * (size - 1) / size * length
    assert one == pytest.approx(two)


@pytest.mark.parametrize("mine", [0, 1, 2, 3])
def test_sums_go_in_rank_order(mine: int) -> None:
    # In float32 1e8 + 1 is 1e8: only the order 0, 1, 2, 3 gives 1.
    pieces = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]
    add_in_order(pieces, pieces[mine])
    assert pieces[mine].item() == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_16_bit_floats_are_rounded_once(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    pieces = [torch.randn(1000).to(dtype) for _ in range(size)]
    exact = pieces[0].float()
    for piece in pieces[1:]:
        exact = exact + piece.float()
    add_in_order(pieces, pieces[-1])
    assert torch.equal(pieces[-1], exact.to(dtype))
