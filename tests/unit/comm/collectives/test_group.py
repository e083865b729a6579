"""Groups over links inside the process: every collective, size and dtype, against plain sums."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.support.comm.ranks import run_ranks
from tllm.comm.collectives.algorithm_choice import LengthChoice
from tllm.comm.collectives.group import Group, local_groups, solo
from tllm.comm.links import frame
from tllm.core.errors import CapacityError, LinkClosed, LinkTimeout

SIZES = [1, 2, 3, 4, 5]


def pieces(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(1)
    if dtype.is_floating_point:
        return [torch.randn(shape, dtype=torch.float64).to(dtype) for _ in range(size)]
    return [torch.randint(0, 2 if dtype == torch.bool else 20, shape).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (1031,)])
@pytest.mark.parametrize("latency_bytes", [0.0, 1e9], ids=["two_step", "one_shot"])
def test_all_reduce_is_the_sum_to_the_bit_on_every_rank(
    size: int, shape: tuple[int, ...], latency_bytes: float
) -> None:
    for dtype in frame.DTYPES:
        given = pieces(size, shape, dtype)
        groups = [
            Group(g.rank, g.size, g.send, g.recv, choice=LengthChoice(size, latency_bytes)) for g in local_groups(size)
        ]
        results = run_ranks(groups, lambda group, given=given: group.all_reduce(given[group.rank].clone()))
        for result in results[1:]:
            assert torch.equal(result.view(-1), results[0].view(-1))
        exact = torch.stack([x.double() for x in given]).sum(0)
        if dtype == torch.bool:
            exact = exact.clamp(max=1)
        tolerance = torch.finfo(dtype).eps * 2 * size if dtype.is_floating_point else 0
        torch.testing.assert_close(results[0].double(), exact, rtol=tolerance, atol=tolerance)
        assert results[0].shape == shape
        assert results[0].dtype == dtype


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("latency_bytes", [0.0, 1e9], ids=["two_step", "one_shot"])
def test_all_reduce_of_a_strided_tensor_leaves_its_neighbours(size: int, latency_bytes: float) -> None:
    groups = [
        Group(g.rank, g.size, g.send, g.recv, choice=LengthChoice(size, latency_bytes)) for g in local_groups(size)
    ]

    def work(group: Group) -> torch.Tensor:
        base = torch.arange(12.0).view(4, 3)
        group.all_reduce(base[:, 1])
        return base

    expected = torch.arange(12.0).view(4, 3)
    expected[:, 1] *= size
    assert all(torch.equal(base, expected) for base in run_ranks(groups, work))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [9, 10, 101])
def test_a_sum_longer_than_its_room_is_made_in_parts(size: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same bits, and no part is received into more than the room."""
    given = pieces(size, (count, 3), torch.float32)
    rows = [count // size + (rank < count % size) for rank in range(size)]

    def work(group: Group) -> tuple[torch.Tensor, torch.Tensor, int]:
        summed = group.all_reduce(given[group.rank].clone())
        mine = group.reduce_scatter(given[group.rank], rows)
        return summed, mine, max(x.nbytes for x in group._links.buffers._memory.values())

    at_once = run_ranks(local_groups(size), work)
    monkeypatch.setattr("tllm.comm.collectives.group.ROOM_BYTES", 64)
    in_parts = run_ranks(local_groups(size), work)
    for one, other in zip(at_once, in_parts, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        assert one[2] > 64 >= other[2]


def test_all_reduce_in_and_outside_inference_mode_share_buffers() -> None:
    def work(group: Group) -> float:
        with torch.inference_mode():
            group.all_reduce(torch.ones(4))
        x = torch.ones(4, requires_grad=True)
        with torch.no_grad():
            group.all_reduce(x)
        return float(group.all_reduce(x.detach()).sum())

    assert run_ranks(local_groups(3), work) == [4 * 9.0] * 3


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_gather_and_barrier(size: int) -> None:
    shapes = [(rank + 1, 2) for rank in range(size)]
    root = size - 1

    def work(group: Group) -> None:
        x = group.broadcast(torch.full((2, 3), float(group.rank)), root=root)
        assert torch.equal(x, torch.full((2, 3), float(root)))
        mine = torch.full(shapes[group.rank], group.rank)
        everyone = [torch.full(shape, rank) for rank, shape in enumerate(shapes)]
        for got in (group.all_gather(mine, shapes), group.gather(mine, shapes, root=root)):
            if got is not None:
                assert all(torch.equal(a, b) for a, b in zip(got, everyone, strict=True))
        assert (group.gather(mine, shapes, root=0) is None) == (group.rank != 0)
        payload = b"plan" if group.rank == root else None
        assert group.broadcast_bytes(payload, root=root, limit=4) == b"plan"
        group.barrier()

    run_ranks(local_groups(size), work)


def test_barrier_waits_for_everyone() -> None:
    late = threading.Event()

    def work(group: Group) -> bool:
        if group.rank == 2:
            time.sleep(0.2)
            late.set()
        group.barrier()
        return late.is_set()

    assert run_ranks(local_groups(3), work) == [True] * 3


def test_a_group_of_one_does_nothing() -> None:
    group = solo()
    x = torch.ones(3)
    assert group.all_reduce(x) is x
    assert group.broadcast(x) is x
    assert group.all_gather(x, [(3,)]) == [x]
    assert group.broadcast_bytes(b"a") == b"a"
    group.barrier()
    assert group.stats() == {}
    group.close()


@pytest.mark.parametrize("sizes", [(40, 40, 40), (0, 101, 0), (101, 0, 0)])
def test_all_ranks_hear_that_they_have_too_many_bytes(sizes: tuple[int, ...]) -> None:
    """The others waited for rank 0 until their deadline."""

    def work(group: Group) -> list[bytes]:
        with pytest.raises(CapacityError, match=r"tell each other 1\d\d bytes or more, and 100 are the most"):
            group.all_gather_bytes(bytes(sizes[group.rank]), limit=100)
        return group.all_gather_bytes(b"abc"[: group.rank], limit=100)

    assert run_ranks(local_groups(3), work) == [[b"", b"a", b"ab"]] * 3
    assert solo().all_gather_bytes(bytes(101), limit=100) == [bytes(101)], "which tells nobody"


def test_a_late_rank_is_named_and_the_group_is_over() -> None:
    def work(group: Group) -> str:
        if group.rank == 1:
            return ""
        group.recv[1].set_deadline(0.1)
        with pytest.raises(LinkTimeout, match=r"rank 1 sent nothing to rank \d within 0.1 s") as late:
            group.all_reduce(torch.ones(4))
        with pytest.raises(LinkClosed, match="tp group is over: rank 1 sent nothing"):
            group.all_reduce(torch.ones(4))
        with pytest.raises(LinkClosed, match="tp group is over: rank 1 sent nothing"):
            group.all_gather_bytes(b"")
        return late.value.message

    messages = run_ranks(local_groups(3), work)
    assert "waited for float32 (4,)" in messages[0]


def test_a_rank_that_closes_is_named_at_once() -> None:
    def work(group: Group) -> None:
        if group.rank == 1:
            group.close()
            return
        with pytest.raises(LinkClosed, match="rank 1 went away"):
            group.all_reduce(torch.ones(4))

    start = time.monotonic()
    run_ranks(local_groups(2, deadline=50), work)
    assert time.monotonic() - start < 20


def test_stats_count_payload_bytes() -> None:
    groups = local_groups(2)
    run_ranks(groups, lambda group: group.all_reduce(torch.ones(10)))
    assert groups[0].stats() == {"0>1": 40, "1>0": 40}


def test_many_shapes_do_not_grow_the_buffers_without_end() -> None:
    groups = local_groups(2)

    def work(group: Group) -> None:
        for n in range(1, 600):
            assert torch.equal(group.all_reduce(torch.ones(n)), torch.full((n,), 2.0))

    run_ranks(groups, work)
    assert all(len(group._links.buffers._views) <= 256 for group in groups)
