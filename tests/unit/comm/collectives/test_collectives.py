"""What ranks do together beside sums: scatter, reduce, all-to-all, sends, and all of it while the caller goes on."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.support.comm.ranks import run_ranks
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.comm.links import frame
from tllm.core.errors import ConfigError, LinkClosed, LinkTimeout

SIZES = [1, 2, 3, 4]


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strided", [False, True])
def test_scatter_and_reduce(size: int, strided: bool) -> None:
    for root in range(size):

        def work(group: Group, root: int = root) -> None:
            pieces = [numbers(rank, (4, 3)) for rank in range(size)]
            out = torch.full((3, 4), -1.0).T if strided else torch.full((4, 3), -1.0)
            assert group.scatter(pieces if group.rank == root else None, out, root) is out
            assert torch.equal(out, pieces[group.rank])
            x = out.clone()
            assert group.reduce(out, root, "max") is out
            want = torch.stack(pieces).amax(0) if group.rank == root else x
            assert torch.equal(out, want)

        run_ranks(local_groups(size), work)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", frame.DTYPES)
def test_all_to_all_of_unequal_pieces(size: int, dtype: torch.dtype) -> None:
    def piece(source: int, target: int) -> torch.Tensor:
        return numbers(7 * source + target, ((source * target) % 3, 2), dtype)

    def work(group: Group) -> None:
        outs = [torch.empty_like(piece(source, group.rank)) for source in range(size)]
        group.all_to_all([piece(group.rank, target) for target in range(size)], outs)
        for source, out in enumerate(outs):
            assert torch.equal(out, piece(source, group.rank))

    run_ranks(local_groups(size), work)


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_into_one_tensor(size: int) -> None:
    counts = [rank % 3 for rank in range(size)]

    def work(group: Group) -> None:
        even = group.all_gather_into(torch.empty(2 * size, 3), numbers(group.rank, (2, 3)))
        assert torch.equal(even, torch.cat([numbers(rank, (2, 3)) for rank in range(size)]))
        mine = numbers(group.rank, (3, counts[group.rank])).T  # not contiguous
        uneven = group.all_gather_into(torch.empty(sum(counts), 3), mine, counts)
        assert torch.equal(uneven, torch.cat([numbers(rank, (3, counts[rank])).T for rank in range(size)]))

    run_ranks(local_groups(size), work)


@pytest.mark.parametrize("op", ["mean", "max", "product"])
def test_reduce_scatter_has_the_bits_of_all_reduce(op: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pieces = [torch.randn(9, 5, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(3)]

        def work(group: Group, pieces: list[torch.Tensor] = pieces) -> None:
            x = pieces[group.rank]
            mine = group.reduce_scatter(x, [2, 3, 4], op)
            assert torch.equal(mine, group.all_reduce(x.clone(), op).split([2, 3, 4])[group.rank])
            assert torch.equal(x, pieces[group.rank])
            for own in (x.clone(), x.T.clone().T):  # the second not contiguous
                inside, (start, stop) = group.reduce_scatter_(own, [2, 3, 4], op), [(0, 2), (2, 5), (5, 9)][group.rank]
                assert torch.equal(inside, mine) and inside.data_ptr() == own[start:stop].data_ptr()
                assert torch.equal(own[:start], x[:start]) and torch.equal(own[stop:], x[stop:])

        run_ranks(local_groups(3), work)


def test_ops_that_make_no_sense_are_refused() -> None:
    for call in (solo().all_reduce, solo().reduce):
        with pytest.raises(ConfigError, match="no mean"):
            call(torch.ones(2, dtype=torch.int32), op="mean")
        with pytest.raises(ConfigError, match="'average'"):
            call(torch.ones(2), op="average")
    with pytest.raises(ConfigError, match="no mean"):
        solo().reduce_scatter(torch.ones(2, dtype=torch.int32), [2], "mean")


@pytest.mark.parametrize("size", SIZES)
def test_what_is_started_gives_what_calls_give(size: int) -> None:
    shapes = [(2, 2)] * size

    def work(group: Group) -> None:
        xs = [numbers(rank, (2, 2)) for rank in range(size)]
        mine, total = xs[group.rank], torch.stack(xs).sum(0)
        start = group.start
        handles = [start(group.all_reduce, mine.clone()) for _ in range(20)]
        root = size - 1
        reduced = start(group.reduce, mine.clone(), root, "min")
        gathered, rows = start(group.gather, mine, shapes, root), start(group.all_gather, mine, shapes)
        scattered = start(group.scatter, xs if group.rank == root else None, torch.empty(2, 2), root)
        part = start(group.reduce_scatter, torch.stack([mine] * size), [1] * size, "mean")
        outs = [torch.empty(2, 2) for _ in range(size)]
        turned = start(group.all_to_all, [mine] * size, outs)
        spread = start(group.broadcast, mine.clone(), root)
        one = start(group.all_gather_into, torch.empty(2 * size, 2), mine)
        group.barrier()  # a call waits for what was started
        assert all(handle.done for handle in [*handles, reduced, gathered, scattered, part, turned, spread, one])
        assert all(torch.equal(handle.wait(), total) for handle in handles)
        assert torch.equal(reduced.wait(), torch.stack(xs).amin(0) if group.rank == root else mine)
        found = gathered.wait()
        assert (found is None) == (group.rank != root)
        for several in (rows.wait(), outs, found or xs, list(one.wait().split(2))):
            assert all(torch.equal(a, b) for a, b in zip(several, xs, strict=True))
        assert torch.equal(scattered.wait(), mine)
        torch.testing.assert_close(part.wait()[0], total / size)
        assert torch.equal(spread.wait(), xs[root])
        start(group.barrier).wait()
        group.close()

    run_ranks(local_groups(size), work)


def test_a_handle_returns_before_the_others_have_begun() -> None:
    go = threading.Event()

    def work(group: Group) -> None:
        if group.rank == 1:
            assert go.wait(20)
        handle = group.start(group.all_reduce, torch.ones(4))
        if group.rank == 0:
            assert not handle.done
            with pytest.raises(LinkTimeout, match=r"^all_reduce of the tp group is not done within 0.01 s"):
                handle.wait(0.01)
            go.set()
        assert torch.equal(handle.wait(), torch.full((4,), 2.0))

    run_ranks(local_groups(2), work)


def test_pairs_send_each_other_while_they_go_on() -> None:
    def work(group: Group) -> None:
        peer = 1 - group.rank
        sent = group.start(group.send_to, peer, numbers(group.rank, (6,)))
        got = group.start(group.recv_from, peer, torch.empty(6))
        sent.wait()
        assert torch.equal(got.wait(), numbers(peer, (6,)))
        swapped = torch.empty(6)
        group.start(group.exchange, {peer: numbers(group.rank, (6,))}, {peer: swapped}).wait()
        assert torch.equal(swapped, numbers(peer, (6,)))

    run_ranks(local_groups(2), work)


def test_tensors_made_in_inference_mode_may_be_started() -> None:
    def work(group: Group) -> float:
        with torch.inference_mode():
            return float(group.start(group.all_reduce, torch.ones(3)).wait().sum())

    assert run_ranks(local_groups(3), work) == [9.0] * 3


def test_what_was_started_fails_with_the_name_of_the_late_rank() -> None:
    def work(group: Group) -> None:
        if group.rank == 1:
            return
        handles = [group.start(group.all_reduce, torch.ones(4)) for _ in range(2)]
        with pytest.raises(LinkTimeout, match=r"rank 1 sent nothing to rank 0 within 0.2 s"):
            handles[0].wait()
        with pytest.raises(LinkClosed, match="tp group is over: rank 1 sent nothing"):
            handles[1].wait()

    run_ranks(local_groups(2, deadline=0.2), work)


def test_closing_wakes_what_is_under_way() -> None:
    left, _ = local_groups(2, deadline=60)
    waiting = left.start(left.recv_from, 1, torch.empty(3))
    never = left.start(left.recv_from, 1, torch.empty(3))
    left.close()
    with pytest.raises(LinkClosed):
        waiting.wait(20)
    assert never.done
