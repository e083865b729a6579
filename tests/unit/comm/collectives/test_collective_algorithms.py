"""Every algorithm of a collective: its bits, the bytes on each link and its rounds, against what is promised."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from tests.support.comm.clocked_links import clocked_groups
from tests.support.comm.fixed_choice import FixedChoice
from tests.support.comm.ranks import run_ranks
from tests.support.selection import covering, soak_but
from tllm.comm.collectives import message_rounds as rounds
from tllm.comm.collectives.all_reduce import (
    AllReduceAlgorithm,
    HierarchicalAllReduce,
    WeightedAllReduce,
    balanced_shares,
    hosts_are_subtrees,
    one_shot_all_reduce,
    ring_all_reduce,
    tree_all_reduce,
    two_step_all_reduce,
)
from tllm.comm.collectives.fold import fold
from tllm.comm.collectives.group import Group, local_groups
from tllm.comm.collectives.group_links import GroupLinks, ReceiveBuffers
from tllm.comm.collectives.reduce_and_broadcast import (
    direct_broadcast,
    direct_reduce,
    scatter_all_gather_broadcast,
    tree_broadcast,
    tree_reduce,
)

SIZES = [2, 3, 4, 5, 6, 7, 8]
LENGTH = 840  # a multiple of every size, so that shares come out in whole elements
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]


def hosts_of(size: int) -> tuple[int, ...]:
    """Two ranks a machine: subtrees, whatever the number of ranks."""
    return tuple(rank // 2 for rank in range(size))


def weights(size: int) -> list[float]:
    return [(rank + 1) / (size * (size + 1) / 2) for rank in range(size)]


def tree_ways(size: int) -> dict[str, AllReduceAlgorithm]:
    return {
        "one_shot": one_shot_all_reduce,
        "two_step": two_step_all_reduce,
        "tree": tree_all_reduce,
        "weighted": WeightedAllReduce(weights(size), 3),
        "last sums nothing": WeightedAllReduce([1 / (size - 1)] * (size - 1) + [0.0], 2),
        "hierarchical one_shot": HierarchicalAllReduce(hosts_of(size), one_shot_all_reduce),
        "hierarchical two_step": HierarchicalAllReduce(hosts_of(size), two_step_all_reduce),
    }


def given(size: int, dtype: torch.dtype, shape: tuple[int, ...] = (LENGTH,)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    if dtype.is_floating_point:
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)]
    return [torch.randint(-9, 9, shape, generator=generator, dtype=dtype) for _ in range(size)]


def folded(pieces: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    copies = [piece.clone() for piece in pieces]
    fold(copies, copies[0], op)
    return copies[0]


def links_of(group: Group) -> GroupLinks:
    return GroupLinks(group.rank, group.send, group.recv, ReceiveBuffers())


OPS = ("sum", "mean", "product", "max", "min")


@pytest.mark.parametrize(
    ("size", "op"),
    soak_but([*((size, "sum") for size in SIZES), *((5, op) for op in OPS[1:])], itertools.product(SIZES, OPS)),
)
def test_all_that_add_as_a_tree_have_its_bits(size: int, op: str) -> None:
    for dtype in DTYPES if op != "mean" else DTYPES[:-1]:
        pieces = given(size, dtype, (7, 33))
        want = folded(pieces, op)
        for name, way in tree_ways(size).items():
            groups = local_groups(size)
            for group in groups:
                group.choice = FixedChoice(way)
            for got in run_ranks(groups, lambda group, p=pieces: group.all_reduce(p[group.rank].clone(), op)):
                assert torch.equal(got, want), f"{name} of {dtype}"


@pytest.mark.parametrize(
    ("size", "op", "way"), covering(SIZES, ["sum", "mean", "max"], ["ring", "odd machines"], together=2)
)
def test_other_orders_agree_among_ranks_and_with_the_tree_to_rounding(size: int, op: str, way: str) -> None:
    algorithm = (
        ring_all_reduce
        if way == "ring"
        else HierarchicalAllReduce([rank % 2 for rank in range(size)], two_step_all_reduce)
    )
    for dtype in DTYPES if op != "mean" else DTYPES[:-1]:
        pieces = given(size, dtype)
        groups = local_groups(size)
        for group in groups:
            group.choice = FixedChoice(algorithm)
        results = run_ranks(groups, lambda group, p=pieces: group.all_reduce(p[group.rank].clone(), op))
        assert all(torch.equal(results[0], result) for result in results)
        exact = folded([piece.double() for piece in pieces], op)
        # One rounding of a 16-bit result, of sums made in float32; at most `size` roundings of a wider one.
        unit = torch.finfo(dtype).eps / (2 if dtype.itemsize == 2 else 1 / size) if dtype.is_floating_point else 0
        scale = torch.stack([piece.double().abs() for piece in pieces]).sum(0)
        assert bool(((results[0].double() - exact).abs() <= unit * scale + 1e-6 * (dtype.itemsize == 2)).all())


def test_ring_adds_in_another_order() -> None:
    pieces = given(4, torch.float32)
    groups = local_groups(4)
    for group in groups:
        group.choice = FixedChoice(ring_all_reduce)
    got = run_ranks(groups, lambda group: group.all_reduce(pieces[group.rank].clone()))[0]
    assert not torch.equal(got, folded(pieces, "sum")), "so it is taken only where any order will do"


@pytest.mark.parametrize("size", SIZES)
def test_to_and_from_one_rank(size: int) -> None:
    for root in {0, 1, size - 1}:
        for dtype in (torch.float32, torch.bfloat16):
            pieces = given(size, dtype)
            want = {op: folded(pieces, op) for op in ("sum", "mean", "min")}

            def work(group: Group, root: int = root, pieces: list[torch.Tensor] = pieces) -> None:
                links = links_of(group)
                for way in (direct_reduce, tree_reduce):
                    for op, total in want.items():  # noqa: B023 - run within this turn of the loop
                        x = pieces[group.rank].clone()
                        way(x, links, op, root)
                        assert group.rank != root or torch.equal(x, total)
                for spread in (direct_broadcast, tree_broadcast, scatter_all_gather_broadcast):
                    x = pieces[group.rank].clone()
                    spread(x, links, root)
                    assert torch.equal(x, pieces[root])

            run_ranks(local_groups(size), work)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_and_hops_are_those_that_are_counted_on(size: int, dtype: torch.dtype) -> None:
    nbytes = LENGTH * dtype.itemsize
    wide = LENGTH * 4
    shares, hosts = weights(size), hosts_of(size)
    # Element counts of uneven shares are rounded, so these are whole: 840 (r + 1) / (n (n + 1) / 2) in chunks of 3.
    expected = {
        "one_shot": (one_shot_all_reduce, rounds.one_shot_rounds(size, nbytes)),
        "two_step": (two_step_all_reduce, rounds.two_step_rounds(size, nbytes)),
        "tree": (tree_all_reduce, rounds.tree_rounds(size, nbytes, wide)),
        "ring": (ring_all_reduce, rounds.ring_rounds(size, nbytes, wide)),
        "weighted": (WeightedAllReduce(shares, 3), rounds.weighted_rounds(shares, 3, nbytes)),
        "one": (
            HierarchicalAllReduce(hosts, one_shot_all_reduce),
            rounds.hierarchical_rounds(hosts, nbytes, wide, rounds.one_shot_rounds),
        ),
        "two": (
            HierarchicalAllReduce(hosts, two_step_all_reduce),
            rounds.hierarchical_rounds(hosts, nbytes, wide, rounds.two_step_rounds),
        ),
    }
    for name, (algorithm, plan) in expected.items():
        groups, clocks, links = clocked_groups(size)
        run_ranks(groups, lambda group, a=algorithm: a(torch.ones(LENGTH, dtype=dtype), links_of(group), "sum"))
        counted = Counter[tuple[int, int]]()
        for traffic in plan:
            counted.update(traffic)
        slack = 12 * dtype.itemsize if name in ("weighted", "two") else 0  # roundings to whole elements
        for pair, link in links.items():
            assert link.bytes_moved == pytest.approx(counted[pair], abs=slack), (name, pair)
        whole = size & (size - 1) == 0 or name in ("one_shot", "two_step", "ring", "weighted")
        hops = len([traffic for traffic in plan if traffic])
        assert max(clocks) == hops if whole else max(clocks) <= hops, name  # a small subtree need not wait for a large


@pytest.mark.parametrize("size", SIZES)
def test_spreads_and_folds_send_what_is_counted_on_and_nothing_else(size: int) -> None:
    nbytes = LENGTH * 4
    for root in (0, size - 1):
        ways = [
            (
                lambda x, links, r=root: direct_broadcast(x, links, r),
                rounds.direct_broadcast_rounds(size, nbytes, root),
            ),
            (
                lambda x, links, r=root: tree_broadcast(x, links, r),
                rounds.tree_broadcast_rounds(range(size), nbytes, root),
            ),
            (
                lambda x, links, r=root: scatter_all_gather_broadcast(x, links, r),
                rounds.scatter_all_gather_rounds(size, nbytes, root),
            ),
            (
                lambda x, links, r=root: direct_reduce(x, links, "sum", r),
                rounds.direct_reduce_rounds(size, nbytes, root),
            ),
            (
                lambda x, links, r=root: tree_reduce(x, links, "sum", r),
                rounds.tree_reduce_rounds(range(size), nbytes, root),
            ),
        ]
        for number, (way, plan) in enumerate(ways):
            groups, _, links = clocked_groups(size)
            run_ranks(groups, lambda group, way=way: way(torch.ones(LENGTH), links_of(group)))
            counted = sum((Counter(traffic) for traffic in plan), Counter())
            assert {pair: link.bytes_moved for pair, link in links.items() if link.bytes_moved} == counted, number
            assert not any(link.wait(0) for link in links.values()), "a message that nobody took"


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_a_short_sum_takes_one_hop_whatever_the_number_of_ranks(size: int) -> None:
    groups, clocks, _ = clocked_groups(size)
    run_ranks(groups, lambda group: one_shot_all_reduce(torch.ones(8), links_of(group), "sum"))
    assert clocks == [1] * size


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_reduce_scatter_sends_no_more_than_it_must(size: int) -> None:
    groups, clocks, links = clocked_groups(size)
    run_ranks(groups, lambda group: group.reduce_scatter(torch.ones(LENGTH), [LENGTH // size] * size))
    for rank in range(size):
        sent = sum(link.bytes_moved for (source, _), link in links.items() if source == rank)
        assert sent == LENGTH * 4 * (size - 1) // size
    assert clocks == [1] * size


def test_shares_end_together_and_the_slow_sum_nothing() -> None:
    assert balanced_shares([1.0] * 4) == pytest.approx([0.25] * 4)
    rates = [10.0, 10.0, 10.0, 1.0]
    shares = balanced_shares(rates)
    assert shares[3] == 0
    assert sum(shares) == pytest.approx(1)
    times = [(1 + 2 * share) / rate for share, rate in zip(shares, rates, strict=True)]
    assert times[:3] == pytest.approx([times[0]] * 3)
    unequal = balanced_shares([4.0, 5.0, 6.0])
    assert sum(unequal) == pytest.approx(1)
    assert [(1 + share) / rate for share, rate in zip(unequal, [4, 5, 6], strict=True)] == pytest.approx([4 / 15] * 3)


@pytest.mark.parametrize(
    ("hosts", "nested"),
    [
        ((0, 0, 1, 1), True),
        ((0, 0, 0, 0, 1, 1, 1), True),
        ((0, 0, 1, 1, 2), True),
        ((0, 1, 2), True),
        ((0, 0, 0), True),
        ((0, 0, 0, 1, 1, 1), False),
        ((0, 1, 0, 1), False),
        ((0, 1, 1), False),
        ((0, 0, 1, 1, 1), False),
    ],
)
def test_machines_that_nest_have_the_bits_of_the_tree(hosts: tuple[int, ...], nested: bool) -> None:
    assert hosts_are_subtrees(hosts) == nested
    pieces = given(len(hosts), torch.float32)
    groups = local_groups(len(hosts))
    way = HierarchicalAllReduce(hosts, one_shot_all_reduce)
    for group in groups:
        group.choice = FixedChoice(way)
    results = run_ranks(groups, lambda group: group.all_reduce(pieces[group.rank].clone()))
    assert torch.equal(results[0], folded(pieces, "sum")) == nested


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_the_tree_is_as_deep_as_its_formula(size: int) -> None:
    depth = math.ceil(math.log2(size))
    assert (
        len(rounds.tree_reduce_rounds(range(size), 1.0)) == len(rounds.tree_broadcast_rounds(range(size), 1.0)) == depth
    )
