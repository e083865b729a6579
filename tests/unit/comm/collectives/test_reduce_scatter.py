"""Reduce-scatter and all-gather by machines: the bits of the direct ones, fewer bytes between machines, and when."""

from __future__ import annotations

import pytest
import torch

from tests.support.comm.even_network import even_network
from tests.support.comm.fixed_choice import ByHost
from tests.support.comm.gloo_devices import connected
from tests.support.comm.ranks import run_ranks
from tests.unit.comm.collectives.test_algorithm_choice import GIGABIT, LONG, with_hosts
from tests.unit.comm.collectives.test_collective_algorithms import DTYPES, OPS, folded, given
from tests.unit.comm.collectives.test_intra_host import every_collective
from tllm.comm.collectives.algorithm_choice import MeasuredChoice
from tllm.comm.collectives.group import Group, local_groups
from tllm.comm.collectives.message_rounds import direct_scatter_rounds, hierarchical_scatter_rounds
from tllm.comm.collectives.reduce_scatter import (
    HierarchicalAllGather,
    HierarchicalReduceScatter,
    direct_all_gather,
    direct_reduce_scatter,
)

MACHINES = [(4, 2), (6, 2), (8, 2), (8, 4), (12, 4)]
"""Ranks, and how many of them are on a machine."""


def by_host(size: int, per_host: int) -> list[Group]:
    groups = local_groups(size)
    for group in groups:
        group.choice = ByHost(size, per_host)
    return groups


def uneven(size: int) -> list[int]:
    """Rows of each rank, of which one has none."""
    return [rank * 2 % 5 + (rank > 1) if rank != 1 else 0 for rank in range(size)]


@pytest.mark.parametrize(("size", "per_host"), MACHINES)
def test_rows_have_the_bits_of_a_tree_over_all_ranks(size: int, per_host: int) -> None:
    counts = uneven(size)
    for op in OPS:
        for dtype in DTYPES if op != "mean" else DTYPES[:-1]:
            parts = given(size, dtype, (sum(counts), 7))
            want = torch.split(folded(parts, op), counts)

            def work(group: Group, parts: list[torch.Tensor] = parts, op: str = op) -> list[torch.Tensor]:
                x = parts[group.rank].clone()
                mine = group.reduce_scatter(x, counts, op)
                assert torch.equal(x, parts[group.rank]), "what is given stays as it is"
                own = group.reduce_scatter_(x, counts, op)
                rows, before = (torch.split(one, counts) for one in (x, parts[group.rank]))
                others = [rank for rank in range(size) if rank != group.rank]
                assert all(torch.equal(rows[rank], before[rank]) for rank in others)
                whole = group.all_gather_into(torch.zeros_like(x), mine, counts)
                return [mine, own, whole]

            for rank, (mine, own, whole) in enumerate(run_ranks(by_host(size, per_host), work)):
                assert torch.equal(mine, want[rank]) and torch.equal(own, want[rank]), f"{op} of {dtype}"
                assert torch.equal(whole, torch.cat(want))


def bytes_between(groups: list[Group], per_host: int) -> list[int]:
    """What each machine has sent to others, in bytes."""
    sent = [0] * (len(groups) // per_host)
    for group in groups:
        for wire, count in group.stats().items():
            source, target = map(int, wire.split(">"))
            if source == group.rank and source // per_host != target // per_host:
                sent[source // per_host] += count
    return sent


@pytest.mark.parametrize(("size", "per_host"), MACHINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_machine_sends_each_piece_once(size: int, per_host: int, dtype: torch.dtype) -> None:
    """By the direct ones it is sent once by every rank of the machine, or to every rank of another."""
    rows, machines = 5 * size, size // per_host
    x = torch.ones(rows, 16, dtype=dtype)
    least = x.nbytes * (machines - 1) // machines
    widens = 2 if dtype == torch.bfloat16 else 1
    for groups, times, wide in (
        (local_groups(size), per_host, 1),
        (by_host(size, per_host), 1, widens),
    ):
        run_ranks(groups, lambda group: group.reduce_scatter(x, [5] * size))
        assert bytes_between(groups, per_host) == [least * times * wide] * machines
        run_ranks(groups, lambda group: group.all_gather_into(x.clone(), x[:5]))
        assert bytes_between(groups, per_host) == [least * times * (wide + 1)] * machines


def test_the_rounds_that_are_costed_are_those_that_are_sent() -> None:
    assert direct_scatter_rounds(4, 100.0) == [{(a, b): 25.0 for a in range(4) for b in range(4) if a != b}]
    inside = {(0, 1): 25.0, (1, 0): 25.0, (2, 3): 25.0, (3, 2): 25.0}
    between = {(0, 2): 25.0, (2, 0): 25.0, (1, 3): 25.0, (3, 1): 25.0}
    assert hierarchical_scatter_rounds(4, 2, 100.0) == [inside, inside, between]


@pytest.mark.parametrize(
    ("hosts", "is_hierarchical"),
    [
        ((0, 0, 1, 1), True),
        ((0, 0, 0, 0, 1, 1, 1, 1), True),
        ((0, 0, 1, 1, 2, 2), True),
        ((0, 0, 1), False),  # one machine has fewer
        ((0, 1, 0, 1), False),  # a machine's ranks are no subtree
        ((0, 0, 0, 1, 1, 1), False),
        ((0, 0, 0, 0), False),
    ],
)
def test_they_are_taken_where_machines_are_alike_and_links_between_them_slow(
    hosts: tuple[int, ...], is_hierarchical: bool
) -> None:
    choice = MeasuredChoice(with_hosts(hosts))
    scatter, gather = choice.reduce_scatter(LONG.nbytes, torch.float32, "sum"), choice.all_gather(LONG.nbytes)
    if not is_hierarchical:
        assert (scatter, gather) == (direct_reduce_scatter, direct_all_gather)
        return
    assert isinstance(scatter, HierarchicalReduceScatter) and isinstance(gather, HierarchicalAllGather)
    assert scatter.per_host == gather.per_host == hosts.count(0)


def test_they_are_not_taken_where_they_cost_more() -> None:
    """On links that are all alike, and of 16-bit numbers on two machines of two ranks: their sums have twice the
    bytes, and go through each machine first."""
    network = even_network(4, 100e-6, GIGABIT)
    assert MeasuredChoice(network).all_gather(LONG.nbytes) is direct_all_gather
    choice = MeasuredChoice(with_hosts((0, 0, 1, 1)))
    assert choice.reduce_scatter(LONG.nbytes, torch.bfloat16, "sum") is direct_reduce_scatter
    assert isinstance(choice.reduce_scatter(LONG.nbytes, torch.bfloat16, "max"), HierarchicalReduceScatter)


def test_messages_between_devices_of_a_machine_have_the_same_bits() -> None:
    wanted = run_ranks(local_groups(4), every_collective)
    groups = by_host(4, 2)
    connected(groups, "aabb")
    for mine, truth in zip(run_ranks(groups, every_collective), wanted, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, truth, strict=True))
    run_ranks(groups, Group.close)
