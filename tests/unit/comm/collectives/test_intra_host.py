"""Groups whose ranks share machines, with gloo in NCCL's place: the same numbers as by links, and the same errors."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.comm.fixed_choice import FixedChoice
from tests.support.comm.gloo_devices import CPU, GlooDevices, connected
from tests.support.comm.ranks import run_ranks
from tllm.comm.collectives.all_reduce import (
    AllReduceAlgorithm,
    HierarchicalAllReduce,
    tree_all_reduce,
    two_step_all_reduce,
)
from tllm.comm.collectives.group import Group, local_groups
from tllm.comm.collectives.intra_host import connect_devices
from tllm.core.errors import FrameError, LinkClosed, LinkError, LinkTimeout

LAYOUTS = {"one machine": "aaa", "two machines": "aabb", "unequal machines": "aab"}


def given(rank: int, dtype: torch.dtype = torch.float64, length: int = 37) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(length, 3, generator=generator, dtype=torch.float64).to(dtype)


def every_collective(group: Group, device: torch.device = CPU) -> list[Tensor]:
    """What a rank has after each collective of a group, with uneven rows, empty ones and strides."""
    n, rank = group.size, group.rank
    counts = [37 - 5 * (n - 2), 0, *([5] * n)][: n - 1]
    counts = [*counts, 37 - sum(counts)]
    mine = given(rank).to(device)
    pieces = [given(10 * rank + peer, length=rank + peer).to(device) for peer in range(n)]
    outs = [torch.zeros_like(piece) for piece in pieces]
    group.all_to_all(pieces, outs)
    rows = torch.zeros_like(mine)
    group.all_gather_into(rows, mine[: counts[rank]], counts)
    gathered = group.gather(mine[:rank], [(p, 3) for p in range(n)], root=1)
    after = [torch.zeros_like(mine[:2]) for _ in range(2)]
    group.exchange({(rank + 1) % n: mine[:2]}, {(rank - 1) % n: after[0]})
    group.scatter([mine[p : p + 2] for p in range(n)] if rank == 0 else None, after[1])
    in_place = mine.clone()
    group.reduce_scatter_(in_place, counts)
    group.barrier()
    return [
        *(group.all_reduce(mine.to(dtype, copy=True)) for dtype in (torch.float64, torch.float32, torch.bfloat16)),
        *(group.all_reduce(mine.clone(), op) for op in ("mean", "product", "max", "min")),
        group.all_reduce(torch.arange(9, dtype=torch.int16, device=device) + rank, "xor"),
        group.all_reduce(mine.T.clone(memory_format=torch.preserve_format)),
        group.reduce(mine.clone(), root=1),
        group.reduce_scatter(mine, counts),
        torch.split(in_place, counts)[rank],
        group.broadcast(mine.clone(), root=n - 1),
        *group.all_gather(mine[:rank], [(p, 3) for p in range(n)]),
        *(gathered or []),
        *group.start(group.all_gather, mine, [(37, 3)] * n).wait(),
        *after,
        *outs,
        rows,
    ]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_collective_has_the_bits_that_it_has_by_links(layout: str) -> None:
    """Several groups of the same ranks at once, each in threads of its own; sums hierarchical where they may be."""
    hosts = [ord(host) - ord("a") for host in layout]
    ways: list[AllReduceAlgorithm] = [
        HierarchicalAllReduce(hosts, two_step_all_reduce),
        tree_all_reduce,
        two_step_all_reduce,
    ]
    wanted = run_ranks(local_groups(len(layout)), every_collective)
    fleets = [local_groups(len(layout), name=f"fleet {n}") for n in range(len(ways))]
    found: list[list[list[Tensor]]] = [[] for _ in fleets]

    def run(number: int) -> None:
        groups = fleets[number]
        for group in groups:
            group.choice = FixedChoice(ways[number])
        words = connected(groups, layout)
        assert [("gloo between" in said) for said in words] == [layout.count(host) > 1 for host in layout], words
        found[number] = run_ranks(groups, every_collective)
        run_ranks(groups, Group.close)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(fleets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for results in found:
        for mine, truth in zip(results, wanted, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(mine, truth, strict=True))


def test_only_messages_between_machines_go_by_links() -> None:
    groups = local_groups(4)
    connected(groups, "aabb")
    for group in groups:
        group.choice = FixedChoice(HierarchicalAllReduce([0, 0, 1, 1], two_step_all_reduce))
    before = [group.stats() for group in groups]
    run_ranks(groups, lambda group: group.all_reduce(given(group.rank)))
    moved = {
        wire: count - before[group.rank][wire]
        for group in groups
        for wire, count in group.stats().items()
        if count != before[group.rank][wire]
    }
    run_ranks(groups, Group.close)
    half = 37 * 3 * 8 // 2
    assert set(moved) == {"0>2", "2>0"} and all(abs(count - 2 * half) <= 16 for count in moved.values()), moved


@pytest.mark.parametrize(
    ("identities", "why"),
    [
        (("x", "x"), "2 ranks of this machine have 1 device"),
        (("x", ""), "1 of 2 ranks of this machine have no device"),
    ],
)
def test_ranks_without_devices_of_their_own_stay_with_their_links(identities: tuple[str, str], why: str) -> None:
    groups = local_groups(2)
    words = run_ranks(groups, lambda g: connect_devices(g, "a", CPU, 20.0, GlooDevices(identities[g.rank])))
    assert all(why in said for said in words) and groups[0].device_links is None
    assert torch.equal(*run_ranks(groups, lambda group: group.all_reduce(given(group.rank))))


def pair(seconds: float = 20.0) -> list[Group]:
    groups = local_groups(2)
    connected(groups, "aa", seconds)
    return groups


def failure(group: Group, work: Callable[[Group], object]) -> tuple[LinkError, float]:
    began = time.monotonic()
    with pytest.raises(LinkError) as caught:
        work(group)
    return caught.value, time.monotonic() - began


def test_who_does_not_come_is_named_and_the_group_is_over() -> None:
    groups = pair()
    groups[0].set_deadline(0.3)
    error, took = failure(groups[0], lambda group: group.all_reduce(given(0)))
    assert isinstance(error, LinkTimeout) and "rank 1 did not come to exchange tensors with rank 0" in error.message
    assert 0.3 <= took < 20.0
    assert isinstance(failure(groups[0], lambda group: group.all_reduce(given(0)))[0], LinkClosed)


def test_who_has_gone_is_named_at_once() -> None:
    groups = pair(seconds=60.0)
    for link in groups[1].send.values():
        link.interrupt()
    error, took = failure(groups[0], lambda group: group.broadcast(given(0), root=1))
    assert isinstance(error, LinkClosed) and "rank 1 went away while rank 0 waited" in error.message and took < 20.0


def test_who_is_done_is_not_waited_for() -> None:
    groups = pair(seconds=60.0)
    closing = threading.Thread(target=groups[1].close_devices)
    closing.start()
    error, took = failure(groups[0], lambda group: group.all_reduce(given(0)))
    closing.join(20)
    assert "rank 1 went away" in error.message and "it has closed them" in error.message and took < 20.0


def test_unlike_tensors_are_refused_at_both_ends() -> None:
    groups = pair()
    errors = run_ranks(groups, lambda g: failure(g, lambda group: group.all_reduce(given(0)[: 5 + group.rank]))[0])
    assert all(isinstance(error, FrameError) for error in errors)
    assert "18 of float64 to the higher rank and 18 of float64 back" in errors[1].message


def test_what_fails_in_the_backend_ends_the_group() -> None:
    groups = local_groups(2)
    meeting = threading.Barrier(2)

    def hold(number: int) -> None:
        if number > 2:  # the first is that of the start
            raise RuntimeError("unhandled cuda error\nand much more")

    run_ranks(groups, lambda g: connect_devices(g, "a", CPU, 20.0, GlooDevices(f"{g.rank}", hold)))

    def twice(group: Group) -> LinkError:
        group.all_reduce(given(0))
        meeting.wait(20)
        return failure(group, lambda group: group.all_reduce(given(0)))[0]

    errors = run_ranks(groups, twice)
    assert all("failed: unhandled cuda error" in error.message for error in errors)


def broadcast_and_close(group: Group, x: Tensor) -> None:
    group.broadcast(x)
    group.close()


def wait_for(going: threading.Event) -> None:
    assert going.wait(20)


def test_who_closes_first_waits_for_what_the_other_reads_and_no_files_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    groups = local_groups(2)
    going = threading.Event()
    backends = [GlooDevices("0"), GlooDevices("1", lambda number: None if number < 2 else wait_for(going))]
    run_ranks(groups, lambda g: connect_devices(g, "a", CPU, 20.0, backends[g.rank]))
    assert groups[0].device_links is not None and not list(tmp_path.iterdir())
    late = given(1)
    slow = threading.Thread(target=broadcast_and_close, args=(groups[1], late))
    slow.start()
    groups[0].broadcast(given(0))
    closing = threading.Thread(target=groups[0].close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive(), "rank 1 has not received what rank 0 sent"
    going.set()
    slow.join(20)
    closing.join(20)
    assert torch.equal(late, given(0))
