"""Every operation of the backend "tllm", called as torch calls it, on ranks that are threads, beside the obvious."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tests.support.comm.c10d import on_each, options, thread_groups
from tllm.comm.c10d.backend import ProcessGroup, create
from tllm.core.errors import ConfigError, FrameError, LinkClosed, LinkError, LinkTimeout

SIZE = 3
Group = ProcessGroup


@pytest.fixture(scope="module")
def groups() -> Iterator[list[Group]]:
    made = thread_groups(SIZE)
    yield made
    on_each(made, lambda group: group.shutdown())


@pytest.fixture
def pair() -> Iterator[list[Group]]:
    made = thread_groups(2)
    yield made
    on_each(made, lambda group: group.shutdown())


def asking(kind: Callable[[], Any], wait: bool = True, **fields: Any) -> Any:
    """Options of torch; a call that is waited for is not asynchronous."""
    found = kind()
    found.asyncOp = not wait
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def given(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(shape or (7,), generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (x * 4).to(dtype)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("op", "truth"),
    [
        (dist.ReduceOp.SUM, lambda x: x.sum(0)),
        (dist.ReduceOp.AVG, lambda x: x.mean(0)),
        (dist.ReduceOp.PRODUCT, lambda x: x.prod(0)),
        (dist.ReduceOp.MIN, lambda x: x.amin(0)),
        (dist.ReduceOp.MAX, lambda x: x.amax(0)),
    ],
)
def test_all_reduce_by_every_op(op: Any, truth: Callable[[Tensor], Tensor], wait: bool, groups: list[Group]) -> None:
    def work(group: Group) -> tuple[Tensor, Tensor]:
        x, y = given(group.rank(), 5, 3), given(group.rank(), 6).requires_grad_()
        opts = asking(dist.AllreduceOptions, wait, reduceOp=op)
        group.allreduce([x], opts).wait()
        group.allreduce([y], opts).wait()
        return x, y.detach()

    want = truth(torch.stack([given(rank, 5, 3) for rank in range(SIZE)]))
    results = on_each(groups, work)
    torch.testing.assert_close(results[0][0], want, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(x, results[0][0]) and torch.equal(y, results[0][1]) for x, y in results)


@pytest.mark.parametrize(
    ("op", "truth"),
    [
        (dist.ReduceOp.BAND, lambda a, b, c: a & b & c),
        (dist.ReduceOp.BOR, lambda a, b, c: a | b | c),
        (dist.ReduceOp.BXOR, lambda a, b, c: a ^ b ^ c),
    ],
)
def test_all_reduce_of_whole_numbers_by_bits(op: Any, truth: Callable[..., Tensor], groups: list[Group]) -> None:
    numbers = torch.randint(0, 1 << 30, (SIZE, 9))

    def work(group: Group) -> Tensor:
        x = numbers[group.rank()].clone()
        group.allreduce([x], asking(dist.AllreduceOptions, reduceOp=op))
        with pytest.raises(ConfigError, match="float32 numbers cannot be combined"):
            group.allreduce([torch.ones(1)], asking(dist.AllreduceOptions, reduceOp=op))
        return x

    assert all(torch.equal(x, truth(*numbers)) for x in on_each(groups, work))


def test_numbers_that_lie_apart_are_summed_in_place_and_no_others(groups: list[Group]) -> None:
    """gloo sums the first elements from the pointer on instead, and says nothing."""

    def work(group: Group) -> Tensor:
        base = torch.ones(4, 4)
        group.allreduce([base[:, 1]], asking(dist.AllreduceOptions))
        group.broadcast([base[:, 2]], asking(dist.BroadcastOptions, rootRank=1))
        return base

    want = torch.ones(4, 4)
    want[:, 1] = SIZE
    assert all(torch.equal(base, want) for base in on_each(groups, work))


def test_complex_numbers_are_summed_and_others_that_cannot_be_are_refused(groups: list[Group]) -> None:
    def work(group: Group) -> Tensor:
        x = torch.full((3,), complex(1, group.rank()))
        group.allreduce([x], asking(dist.AllreduceOptions))
        with pytest.raises(ConfigError, match="float8_e4m3fn tensors by 'sum'"):
            group.allreduce([torch.ones(2).to(torch.float8_e4m3fn)], asking(dist.AllreduceOptions))
        return x

    assert all(torch.equal(x, torch.full((3,), complex(3, 3))) for x in on_each(groups, work))


def test_reduce_reaches_the_root_only(groups: list[Group]) -> None:
    def work(group: Group) -> Tensor:
        x = given(group.rank())
        group.reduce([x], asking(dist.ReduceOptions, rootRank=2, reduceOp=dist.ReduceOp.SUM))
        return x

    results = on_each(groups, work)
    torch.testing.assert_close(results[2], sum(given(rank) for rank in range(SIZE)), rtol=1e-12, atol=1e-12)
    assert torch.equal(results[0], given(0)) and torch.equal(results[1], given(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint16, torch.float8_e4m3fn, torch.complex64])
def test_what_moves_keeps_its_bits_whatever_the_dtype(dtype: torch.dtype, groups: list[Group]) -> None:
    def one(rank: int) -> Tensor:
        return (torch.arange(6).reshape(2, 3) + rank).to(dtype)

    def bits(x: Tensor) -> Tensor:
        return x.contiguous().view(torch.uint8)

    def work(group: Group) -> None:
        rank = group.rank()
        x = one(rank)
        group.broadcast([x], asking(dist.BroadcastOptions, rootRank=1))
        assert torch.equal(bits(x), bits(one(1)))
        outs = [torch.zeros_like(x) for _ in range(SIZE)]
        group.allgather([outs], [one(rank)], asking(c10d.AllgatherOptions))
        whole = torch.zeros(SIZE * 2, 3, dtype=dtype)
        group.all_gather_single(whole, one(rank).t().contiguous().t(), asking(c10d.AllgatherOptions))
        for peer in range(SIZE):
            assert torch.equal(bits(outs[peer]), bits(one(peer)))
            assert torch.equal(bits(whole[2 * peer : 2 * peer + 2]), bits(one(peer)))
        got = torch.zeros_like(x)
        pieces = [[one(10 * rank + peer) for peer in range(SIZE)]] if rank == 1 else []
        group.scatter([got], pieces, asking(c10d.ScatterOptions, rootRank=1))
        assert torch.equal(bits(got), bits(one(10 + rank)))
        outs = [torch.zeros_like(x) for _ in range(SIZE)] if rank == 2 else []
        group.gather([outs] if outs else [], [one(rank)], asking(c10d.GatherOptions, rootRank=2))
        assert all(torch.equal(bits(out), bits(one(peer))) for peer, out in enumerate(outs))

    on_each(groups, work)


@pytest.mark.parametrize("wait", [True, False])
def test_reduce_scatter_gives_each_its_rows_of_the_sum(wait: bool, groups: list[Group]) -> None:
    counts = [1, 4, 0]

    def work(group: Group) -> None:
        rank, n = group.rank(), SIZE
        opts = asking(c10d.ReduceScatterOptions, wait, reduceOp=dist.ReduceOp.SUM)
        want = sum(given(peer, 2 * n, 5) for peer in range(n))
        out = torch.zeros(2, 5, dtype=torch.float64)
        group.reduce_scatter_single(out, given(rank, 2 * n, 5), opts).wait()
        torch.testing.assert_close(out, want[2 * rank : 2 * rank + 2], rtol=1e-12, atol=1e-12)
        flat = torch.zeros(10, 2, dtype=torch.float64)[:, 0]  # lies apart, and is shaped otherwise
        group.reduce_scatter_single_coalesced([flat], [given(rank, 2 * n, 5)], opts).wait()
        assert torch.equal(flat.view(2, 5) if flat.is_contiguous() else flat.reshape(2, 5), out)
        rows = given(rank, 5, 3).split(counts)
        mine = torch.zeros(counts[rank], 3, dtype=torch.float64)
        group.reduce_scatter([mine], [list(rows)], opts).wait()
        want = sum(given(peer, 5, 3) for peer in range(n)).split(counts)[rank]
        torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-12)

    on_each(groups, work)


def test_all_to_all_even_uneven_and_empty(groups: list[Group]) -> None:
    counts = [[1, 2, 0], [0, 3, 1], [2, 0, 0]]  # rows from rank a to rank b

    def rows(a: int, b: int) -> Tensor:
        return torch.full((counts[a][b], 4), 10 * a + b)

    def work(group: Group) -> None:
        rank = group.rank()
        x = torch.cat([rows(rank, b) for b in range(SIZE)])
        here = [counts[a][rank] for a in range(SIZE)]
        out = torch.zeros(sum(here), 4, dtype=torch.int64)
        group.all_to_all_single(out, x, here, counts[rank], asking(c10d.AllToAllOptions))
        assert torch.equal(out, torch.cat([rows(a, rank) for a in range(SIZE)]))
        outs = [torch.zeros(n, 4, dtype=torch.int64) for n in here]
        group.alltoall(outs, [rows(rank, b) for b in range(SIZE)], asking(c10d.AllToAllOptions))
        assert torch.equal(torch.cat(outs), out)
        even = torch.zeros(SIZE, 2)
        mine = torch.arange(SIZE)[:, None].expand(SIZE, 2) + 10.0 * rank
        group.all_to_all_single(even, mine, [], [], asking(c10d.AllToAllOptions))
        assert torch.equal(even[:, 1], torch.arange(SIZE) * 10.0 + rank)
        with pytest.raises(ConfigError, match=r"3 rows cannot be split as \[1, 1, 2\]"):
            group.all_to_all_single(even, even, [1, 1, 2], [1, 1, 1], asking(c10d.AllToAllOptions))

    on_each(groups, work)


def test_what_torch_called_otherwise_before_is_there_by_those_names(groups: list[Group]) -> None:
    """By torch 2.11; FSDP2, DTensor and functional collectives call by them there."""

    def work(group: Group) -> None:
        mine, every = torch.full((2,), float(group.rank())), torch.arange(float(SIZE)).repeat_interleave(2)
        for gather in (
            lambda out: group._allgather_base(out, mine, asking(c10d.AllgatherOptions)),
            lambda out: group.allgather_into_tensor_coalesced([out], [mine]),
        ):
            gather(out := torch.zeros(2 * SIZE)).wait()
            assert torch.equal(out, every)
        opts = asking(c10d.ReduceScatterOptions, reduceOp=dist.ReduceOp.SUM)
        for scatter in (
            lambda out: group._reduce_scatter_base(out, every, opts),
            lambda out: group.reduce_scatter_tensor_coalesced([out], [every], opts),
        ):
            scatter(out := torch.zeros(2)).wait()
            assert torch.equal(out, SIZE * mine)
        group.alltoall_base(out := torch.zeros(2 * SIZE), mine.repeat(SIZE), [], [], asking(c10d.AllToAllOptions))
        assert torch.equal(out, every)

    on_each(groups, work)


def test_a_receive_that_waits_holds_up_no_collective_and_no_other_tag(groups: list[Group]) -> None:
    """Every rank waits for both others first; then they sum, then they send, the second tag first."""

    def work(group: Group) -> None:
        rank = group.rank()
        peers = [peer for peer in range(SIZE) if peer != rank]
        got = {(peer, tag): torch.zeros(2, 3, dtype=torch.float64)[:, ::2] for peer in peers for tag in (0, 5)}
        waiting = [group.recv([out], peer, tag) for (peer, tag), out in got.items()]
        x = given(rank)
        group.allreduce([x], asking(dist.AllreduceOptions))
        assert not any(one.is_completed() for one in waiting)
        group.barrier(asking(dist.BarrierOptions))
        sent = [group.send([given(10 * rank + peer + tag, 2, 2)], peer, tag) for tag in (5, 0) for peer in peers]
        for one in [*waiting, *sent]:
            assert one.wait()
        for (peer, tag), out in got.items():
            assert torch.equal(out, given(10 * peer + rank + tag, 2, 2))

    on_each(groups, work)


@pytest.mark.parametrize("tag", [0, 3])
def test_several_sends_of_a_tag_keep_their_order(tag: int, groups: list[Group]) -> None:
    def work(group: Group) -> None:
        if group.rank() == 0:
            for one in [group.send([torch.full((3,), i)], 1, tag) for i in range(40)]:
                one.wait()
        elif group.rank() == 1:
            if tag:
                time.sleep(0.3)  # so that it is not expected yet when the first of it comes
            outs = [torch.zeros(3, dtype=torch.int64) for _ in range(40)]
            for one in [group.recv([out], 0, tag) for out in outs]:
                one.wait()
            assert torch.stack(outs)[:, 0].tolist() == list(range(40))

    on_each(groups, work)


def test_started_collectives_end_in_order_and_their_futures_give_the_tensors(groups: list[Group]) -> None:
    def work(group: Group) -> list[float]:
        xs = [torch.full((2,), float(i)) for i in range(20)]
        works = [group.allreduce([x], asking(dist.AllreduceOptions, wait=False)) for x in xs]
        ends = [one.get_future().then(lambda end: float(end.value()[0][0])) for one in works]
        return [end.wait() for end in ends]

    assert on_each(groups, work) == [[float(SIZE * i) for i in range(20)]] * SIZE


def test_a_collective_started_where_another_ends_is_refused(groups: list[Group]) -> None:
    """In such a place it would come before or after those that the other ranks have started meanwhile."""

    def work(group: Group) -> str:
        go = threading.Event()
        first = group._group.start(go.wait)  # so that what follows ends in the group's own thread
        end = group.allreduce([torch.ones(1)], asking(dist.AllreduceOptions, wait=False)).get_future()
        later = end.then(lambda _: group.allreduce([torch.ones(1)], asking(dist.AllreduceOptions, wait=False)))
        go.set()
        first.wait()
        with pytest.raises(RuntimeError) as raised:
            later.wait()
        return str(raised.value)

    assert all("started where another has just ended" in words for words in on_each(groups, work))


def test_what_is_no_tensor_for_it_is_refused(groups: list[Group]) -> None:
    group = groups[0]
    with pytest.raises(ConfigError, match="recv from any rank"):
        group.recv_anysource([torch.ones(1)], 0)
    with pytest.raises(ConfigError, match="on meta"):
        group.allreduce([torch.ones(1, device="meta")], asking(dist.AllreduceOptions))
    with pytest.raises(ConfigError, match="sparse"):
        group.allreduce([torch.ones(1).to_sparse()], asking(dist.AllreduceOptions))
    with pytest.raises(ConfigError, match=r"float32 \(2,\) a rank and torch.float32 \(5,\) for all 3"):
        group.all_gather_single(torch.ones(5), torch.ones(2), asking(c10d.AllgatherOptions))
    opts = asking(dist.AllreduceOptions, reduceOp=dist.ReduceOp.PREMUL_SUM(0.5))
    with pytest.raises(ConfigError, match="combines by SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR alone"):
        group.allreduce([torch.ones(1)], opts)


def test_ranks_that_do_not_agree_are_named_with_what_each_has(pair: list[Group]) -> None:
    """gloo ends the process, or gives garbage."""

    def work(group: Group) -> str:
        with pytest.raises(LinkError) as raised:
            group.allreduce([torch.ones(2 + group.rank())], asking(dist.AllreduceOptions)).wait()
        return str(raised.value)

    words = on_each(pair, work)
    assert "all_reduce of rank 0 in group test: rank 1 sent rank 0 float32 (3,)" in words[0] or "rank 1" in words[0]
    assert any("float32 (3,)" in one or "float32 (2,)" in one for one in words)


def test_a_rank_that_does_not_come_is_named_by_the_deadline_and_then_the_group_is_over(pair: list[Group]) -> None:
    first = pair[0]
    first.set_timeout(timedelta(seconds=0.2))
    start = time.monotonic()
    work = first.allreduce([torch.ones(2)], asking(dist.AllreduceOptions, wait=False))
    end = work.get_future()
    with pytest.raises(
        LinkTimeout, match=r"all_reduce of rank 0 in group test: rank 1 sent nothing to rank 0 within 0.2 s"
    ):
        work.wait()
    assert time.monotonic() - start < 20
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), LinkTimeout)
    with pytest.raises(RuntimeError, match="rank 1 sent nothing"):
        end.wait()
    with pytest.raises(LinkClosed, match=r"broadcast of rank 0 .*the group|broadcast of rank 0 .*is over"):
        first.broadcast([torch.ones(1)], asking(dist.BroadcastOptions))


def test_waiting_for_less_than_the_deadline_leaves_the_collective_going_on(pair: list[Group]) -> None:
    work = pair[0].allreduce([x := torch.ones(2)], asking(dist.AllreduceOptions, wait=False))
    with pytest.raises(LinkTimeout, match=": all_reduce of the test group is not done within"):
        work.wait(timedelta(milliseconds=20))
    pair[1].allreduce([torch.ones(2)], asking(dist.AllreduceOptions))
    assert work.wait() and torch.equal(x, torch.full((2,), 2.0))


def test_abort_wakes_whoever_waits(pair: list[Group]) -> None:
    waiting = [
        pair[0].allreduce([torch.ones(2)], asking(dist.AllreduceOptions, wait=False)),
        pair[0].recv([torch.ones(2)], 1, 0),
    ]
    pair[1].send([torch.ones(1)], 0, 7).is_completed()
    pair[0].set_timeout(timedelta(seconds=500))
    pair[0].abort()
    with pytest.raises(LinkClosed, match="closed on this side"):
        waiting[0].wait(timedelta(seconds=20))


@pytest.mark.parametrize("tag", [0, 7])
@pytest.mark.parametrize("way", ["recv", "send"])
def test_a_rank_that_ends_is_missed_by_whoever_waits_for_it_whatever_the_tag(way: str, tag: int) -> None:
    """Long before the timeout, which is longer than this test may take."""
    pair = thread_groups(2, seconds=500.0)
    x = torch.ones(1 << (8 if way == "recv" else 24))  # more than a socket takes
    waiting = getattr(pair[0], way)([x], 1, tag)
    if (way, tag) == ("send", 0):  # the link of this tag is open from the start and takes a message ahead
        waiting.wait()
    pair[1].shutdown()
    if (way, tag) == ("send", 0):
        waiting = pair[0].send([x], 1, tag)
    with pytest.raises(LinkClosed, match=rf"{way} of rank 0 in group test: rank 1 went away while rank 0"):
        waiting.wait()
    pair[0].shutdown()


@pytest.mark.parametrize("way", ["recv", "send"])
def test_abort_wakes_whoever_waits_for_a_link(way: str) -> None:
    pair = thread_groups(2, seconds=500.0)
    waiting = getattr(pair[0], way)([torch.ones(2)], 1, 7)
    pair[0].abort()
    with pytest.raises(LinkClosed, match=rf"{way} of rank 0 .*closed on this side"):
        waiting.wait()
    on_each(pair, lambda group: group.shutdown())


def test_what_a_rank_sent_before_it_ended_still_comes() -> None:
    pair = thread_groups(2, seconds=500.0)
    tags = (0, 3, 4)
    outs = [torch.zeros(1 << 18) for _ in tags]
    waiting = [pair[1].recv([out], 0, tag) for out, tag in zip(outs, tags, strict=True)]
    for tag in tags:
        pair[0].send([torch.full((1 << 18,), float(tag + 1))], 1, tag).wait()
    pair[0].shutdown()
    for one, out, tag in zip(waiting, outs, tags, strict=True):
        assert one.wait() and bool((out == tag + 1).all())
    pair[1].shutdown()


def test_a_group_of_one_does_all_alone() -> None:
    (group,) = thread_groups(1)
    x = torch.arange(3.0)
    group.allreduce([x], asking(dist.AllreduceOptions))
    out = torch.zeros(3)
    group.all_gather_single(out, x, asking(c10d.AllgatherOptions))
    group.barrier(asking(dist.BarrierOptions))
    assert torch.equal(out, torch.arange(3.0)) and group.size() == 1
    with pytest.raises(ConfigError, match="nobody to send to"):
        group.send([x], 0, 0)
    group.shutdown()


@pytest.mark.parametrize("name", ["tllm", "cpu:tllm", "cpu:tllm,cuda:nccl"])
def test_by_each_of_its_names_torch_takes_it_for_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a backend written in Python torch gives the whole group, and never asks for the second."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own there
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(x := torch.ones(2))
        assert torch.equal(x, torch.ones(2))
        with pytest.raises(ConfigError, match="a tensor is on meta") as raised:
            dist.all_reduce(torch.ones(2, device="meta"))
        assert "dist.new_group(backend='nccl')" in raised.value.hint
    finally:
        dist.destroy_process_group()


def test_ranks_meet_again_by_the_same_store_though_rank_0_comes_last() -> None:
    """Nothing of the first meeting is taken for the second."""
    store = dist.HashStore()
    on_each(thread_groups(SIZE, store=store), lambda group: group.shutdown())
    with ThreadPoolExecutor(2) as pool:
        last = pool.submit(create, options(store, 1, 2), None)
        time.sleep(0.1)
        made = [pool.submit(create, options(store, 0, 2), None).result(), last.result()]
    sums = [torch.ones(1), torch.ones(1)]
    on_each(made, lambda group: group.allreduce([sums[group.rank()]], asking(dist.AllreduceOptions)))
    assert sums == [torch.full((1,), 2.0)] * 2
    on_each(made, lambda group: group.shutdown())


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_what_torch_lacks_it_says_itself() -> None:
    with pytest.raises(RuntimeError, match="doesn't have NCCL built in"):
        dist.init_process_group("cuda:nccl,cpu:tllm", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def test_frames_of_another_length_are_refused_between_two(pair: list[Group]) -> None:
    pair[0].send([torch.ones(3)], 1, 0).wait()
    with pytest.raises(FrameError, match=r"recv of rank 1 in group test: rank 0 sent rank 1 float32 \(3,\)"):
        pair[1].recv([torch.ones(2)], 0, 0).wait()
