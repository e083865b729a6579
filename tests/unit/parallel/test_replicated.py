"""Gradients of elements held by several ranks: who holds what, their sums, and who counts them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from tests.support.comm.ranks import run_ranks
from tests.support.models.reference_gradients import sum_partial
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.parallel.replicated import ReplicatedParameters
from tllm.parallel.shard import Gradient, Shard, ShardPiece, cut_parameter

ROWS = ((0, 4), (2, 6), (5, 9))  # of a table of 9: rows 2, 3 and 5 are held twice, none three times
WIDTH = 3


def stage(rank: int) -> list[nn.Parameter]:
    """A norm, a projection of which some rows are alone (q) and some shared (k), and a linear that nobody shares."""
    first, last = ROWS[rank]
    kv = ShardPiece("k", ((first, last), (0, WIDTH)), ((2, 2 + last - first), (0, WIDTH)))
    q = ShardPiece("q", ((2 * rank, 2 * rank + 2), (0, WIDTH)), ((0, 2), (0, WIDTH)))
    return [
        cut_parameter((5,), Shard((ShardPiece("norm"),), True, "partial")),
        cut_parameter((2 + last - first, WIDTH), Shard((q, kv), True, "partial")),
        cut_parameter((4,), Shard((ShardPiece("bias"),), True, "whole")),
        cut_parameter((2, WIDTH), Shard((ShardPiece("alone", ((2 * rank, 2 * rank + 2), (0, WIDTH))),))),
    ]


def gradient(name: str, rank: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * rank + len(name)))


def local(rank: int) -> list[Tensor]:
    first, last = ROWS[rank]
    return [
        gradient("norm", rank, (5,)),
        torch.cat((gradient("qq", rank, (6, WIDTH))[:2], gradient("k", rank, (9, WIDTH))[first:last])),
        gradient("bias_", 0, (4,)),
        gradient("alone__", rank, (2, WIDTH)),
    ]


def in_rank_order(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def test_partial_gradients_are_summed_over_their_holders_and_only_there() -> None:
    def work(tp: Group) -> list[Tensor]:
        gradients = local(tp.rank)
        ReplicatedParameters(stage(tp.rank), tp).sum_partial(gradients)
        return gradients

    for rank, (norm, qk, bias, alone) in enumerate(run_ranks(local_groups(3), work)):
        assert torch.equal(norm, in_rank_order([gradient("norm", r, (5,)) for r in range(3)]))
        assert torch.equal(qk[:2], local(rank)[1][:2])
        for row in range(*ROWS[rank]):
            holders = [r for r in range(3) if ROWS[r][0] <= row < ROWS[r][1]]
            want = in_rank_order([gradient("k", r, (9, WIDTH))[row] for r in holders])
            assert torch.equal(qk[2 + row - ROWS[rank][0]], want)
        assert torch.equal(bias, local(rank)[2]) and torch.equal(alone, local(rank)[3])


def test_a_table_longer_than_its_room_is_summed_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same bits; every message fits the room, and all that is small goes in one."""
    longest = []

    def work(tp: Group) -> list[Tensor]:
        gradients = local(tp.rank)
        replicas, exchange = ReplicatedParameters(stage(tp.rank), tp), tp.exchange

        def watched(sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
            longest.extend(x.numel() for x in sends.values())
            exchange(sends, recvs)

        tp.exchange = watched  # type: ignore[method-assign]
        replicas.sum_partial(gradients)
        return gradients

    at_once = run_ranks(local_groups(3), work)
    assert max(longest) == 5 + 2 * WIDTH, "the norm and the rows that two hold"
    longest.clear()
    monkeypatch.setattr("tllm.parallel.replicated.MAX_ELEMENTS", WIDTH)
    monkeypatch.setattr("tllm.parallel.replicated.SMALL_CELL", 0)
    by_rows = run_ranks(local_groups(3), work)
    assert max(longest) == WIDTH, "a row, or as many numbers of a norm"
    for one, other in zip(at_once, by_rows, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_every_element_is_counted_once() -> None:
    def work(tp: Group) -> dict[str, Tensor]:
        parameters = stage(tp.rank)
        counted = [torch.ones(p.shape) for p in parameters]
        for ones, places in zip(counted, ReplicatedParameters(parameters, tp).counted_elsewhere(), strict=True):
            for place in places:
                ones[place] = 0
        first, last = ROWS[tp.rank]
        k = torch.zeros(9, WIDTH)
        k[first:last] = counted[1][2:]
        return {"norm": counted[0], "q": counted[1][:2], "k": k, "bias": counted[2], "alone": counted[3]}

    ranks = run_ranks(local_groups(3), work)
    for name in ("norm", "k", "bias"):
        assert (sum(rank[name] for rank in ranks) == 1).all(), name
    assert all((rank[name] == 1).all() for rank in ranks for name in ("q", "alone"))


def test_a_piece_that_is_all_of_its_parameter_and_not_the_start_of_its_tensor() -> None:
    def work(tp: Group) -> Tensor:
        piece = ShardPiece("table", ((2 + tp.rank, 5 + tp.rank), (0, WIDTH)))
        gradient = torch.ones(3, WIDTH)
        ReplicatedParameters([cut_parameter((3, WIDTH), Shard((piece,), True, "partial"))], tp).sum_partial([gradient])
        return gradient[:, 0]

    first, second = run_ranks(local_groups(2), work)
    assert first.tolist() == [1, 2, 2] and second.tolist() == [2, 2, 1]


def test_a_missing_gradient_is_a_zero() -> None:
    def work(tp: Group) -> Tensor:
        parameter = cut_parameter((3,), Shard((ShardPiece("norm"),), True, "partial"))
        if tp.rank:
            parameter.grad = torch.full((3,), 2.0)
        sum_partial([parameter], tp)
        assert parameter.grad is not None
        return parameter.grad

    assert all(torch.equal(x, torch.full((3,), 2.0)) for x in run_ranks(local_groups(2), work))


def test_holders_that_differ_on_what_they_compute_are_refused() -> None:
    def work(tp: Group) -> None:
        kind: Gradient = "partial" if tp.rank else "whole"
        ReplicatedParameters([cut_parameter((3,), Shard((ShardPiece("norm"),), True, kind))], tp)

    with pytest.raises(AssertionError, match="differ on what its gradient is"):
        run_ranks(local_groups(2), work)


def test_one_rank_alone_has_nothing_to_sum() -> None:
    gradients = local(0)
    ReplicatedParameters(stage(0), solo()).sum_partial(gradients)
    assert all(torch.equal(a, b) for a, b in zip(gradients, local(0), strict=True))
