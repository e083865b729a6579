"""Which way is taken on which links, and that what is measured is what the links can do."""

from __future__ import annotations

import pytest
import torch

from tests.support.comm.even_network import even_network
from tests.support.comm.ranks import run_ranks, tcp_groups
from tllm.comm.collectives import tuning as measuring
from tllm.comm.collectives.algorithm_choice import LengthChoice, MeasuredChoice, _coarse
from tllm.comm.collectives.all_reduce import (
    HierarchicalAllReduce,
    WeightedAllReduce,
    one_shot_all_reduce,
    ring_all_reduce,
    tree_all_reduce,
    two_step_all_reduce,
)
from tllm.comm.collectives.group import Group, local_groups
from tllm.comm.collectives.message_rounds import one_shot_rounds, two_step_rounds
from tllm.comm.collectives.network_model import NetworkModel
from tllm.comm.collectives.reduce_and_broadcast import (
    direct_broadcast,
    direct_reduce,
    scatter_all_gather_broadcast,
    tree_broadcast,
    tree_reduce,
)
from tllm.comm.collectives.tuning import measure_network, pair_rounds, tune_group

GIGABIT = 125e6
WIDE = even_network(4, latency=10e-3, rate=GIGABIT)
DECODE = torch.empty(4096, dtype=torch.bfloat16)
LONG = torch.empty(16 << 20, dtype=torch.uint8)


def with_hosts(hosts: tuple[int, ...]) -> NetworkModel:
    """Gigabit between machines, a hundred times better inside each."""
    ranks = range(len(hosts))
    near = [[hosts[a] == hosts[b] for b in ranks] for a in ranks]
    latency = tuple(tuple(1e-6 if one else 100e-6 for one in row) for row in near)
    rate = tuple(tuple(100 * GIGABIT if one else GIGABIT for one in row) for row in near)
    return NetworkModel(latency, rate, hosts)


@pytest.mark.parametrize("size", [2, 3, 8, 64])
def test_over_a_slow_wire_a_decode_step_takes_one_delay(size: int) -> None:
    network = even_network(size, latency=10e-3, rate=GIGABIT)
    assert MeasuredChoice(network).all_reduce(DECODE, "sum") is one_shot_all_reduce


def test_equal_links_cost_what_the_closed_formulas_say() -> None:
    network = even_network(4, latency=1e-3, rate=1e6, message=1e-5)
    assert network.seconds(one_shot_rounds(4, 1000)) == pytest.approx(1e-3 + 6 * 1e-5 + 3 * 1000 / 1e6)
    assert network.seconds(two_step_rounds(4, 1000)) == pytest.approx(2 * (1e-3 + 6 * 1e-5 + 3 / 4 * 1000 / 1e6))


def test_long_sums_take_two_steps_and_many_ranks_a_tree() -> None:
    assert MeasuredChoice(WIDE).all_reduce(LONG, "max") is two_step_all_reduce
    many = even_network(64, latency=1e-6, rate=1e9, message=20e-6)
    assert MeasuredChoice(many).all_reduce(torch.empty(8), "sum") is tree_all_reduce
    assert MeasuredChoice(WIDE, any_order=True).all_reduce(LONG, "max") is two_step_all_reduce, (
        "on equal links a ring is no better"
    )


def test_a_slow_rank_sums_less() -> None:
    slow = tuple(tuple(GIGABIT / 10 if 3 in (a, b) else GIGABIT for b in range(4)) for a in range(4))
    network = NetworkModel(even_network(4, 1e-4, 1).latency, slow, (0, 1, 2, 3))
    chosen = MeasuredChoice(network).all_reduce(LONG, "max")
    assert isinstance(chosen, WeightedAllReduce)
    assert chosen.shares == pytest.approx((1 / 3, 1 / 3, 1 / 3, 0))
    assert MeasuredChoice(network).all_reduce(torch.empty(8), "sum") is one_shot_all_reduce


def test_ranks_of_one_machine_sum_there_first() -> None:
    network = with_hosts((0, 0, 0, 0, 1, 1, 1, 1))
    for x in (DECODE, LONG):
        assert isinstance(MeasuredChoice(network).all_reduce(x, "max"), HierarchicalAllReduce)


def test_an_order_of_its_own_is_taken_only_where_it_may() -> None:
    network = with_hosts((0, 0, 0, 1, 1, 1))  # three ranks are no subtree
    plain, free = MeasuredChoice(network), MeasuredChoice(network, any_order=True)
    assert not isinstance(plain.all_reduce(LONG, "sum"), HierarchicalAllReduce)
    assert isinstance(free.all_reduce(LONG, "sum"), HierarchicalAllReduce)
    # Side by side in a ring of machines, links between others are slow: only a ring goes round them.
    ranks = range(6)
    rates = tuple(tuple(GIGABIT if (a - b) % 6 in (1, 5) else GIGABIT / 50 for b in ranks) for a in ranks)
    odd = NetworkModel(even_network(6, 1e-6, 1).latency, rates, tuple(ranks))
    assert MeasuredChoice(odd, any_order=True).all_reduce(LONG, "max") is ring_all_reduce
    assert MeasuredChoice(odd).all_reduce(LONG, "max") is not ring_all_reduce


def test_spreads_and_folds() -> None:
    choice = MeasuredChoice(even_network(16, 100e-6, GIGABIT, message=10e-6))
    assert choice.broadcast(LONG, 3) is scatter_all_gather_broadcast
    assert choice.reduce(LONG, "max", 3) is tree_reduce
    few = MeasuredChoice(even_network(3, 10e-3, GIGABIT))
    assert few.broadcast(DECODE, 0) is direct_broadcast
    assert few.reduce(DECODE, "sum", 0) is direct_reduce
    assert MeasuredChoice(even_network(64, 1e-6, 1e9, message=20e-6)).broadcast(DECODE, 0) is tree_broadcast
    assert LengthChoice(3).broadcast(LONG, 0) is direct_broadcast


def test_choices_are_made_once_for_lengths_that_are_almost_the_same() -> None:
    choice = MeasuredChoice(WIDE)
    x = torch.empty(1 << 20, dtype=torch.uint8)
    for n in range(0, 1 << 20, 997):
        choice.all_reduce(x[:n], "max")
    assert len(choice._all_reduces._known) <= 8 * 21
    assert [_coarse(n) for n in (0, 5, 15, 16, 17, 1023, 1024)] == [0, 5, 15, 16, 16, 960, 1024]


@pytest.mark.parametrize("hosts", [(0,), (0, 1), (0, 1, 2, 3, 4), (0, 0, 1, 1), (0, 0, 0)])
def test_every_pair_is_measured_once_and_no_machine_twice_at_a_time(hosts: tuple[int, ...]) -> None:
    turns = pair_rounds(hosts)
    pairs = [pair for turn in turns for pair in turn]
    assert sorted(pairs) == [(a, b) for a in range(len(hosts)) for b in range(a + 1, len(hosts))]
    for turn in turns:
        machines = [machine for a, b in turn for machine in {hosts[a], hosts[b]}]
        assert len(machines) == len(set(machines))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_find_the_same_network_and_sum_by_it(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "PAIR_SECONDS", 0.002)
    monkeypatch.setattr(measuring, "LAST_BYTES", 1 << 20)

    def work(group: Group) -> tuple[NetworkModel, torch.Tensor]:
        network = tune_group(group, host=f"host {group.rank // 2}")
        assert isinstance(group.choice, MeasuredChoice) == (size > 1)
        x = group.all_reduce(torch.full((50_000,), float(group.rank)))
        group.broadcast(x, root=size - 1)
        return network, group.reduce(x, root=0, op="max")

    results = run_ranks(local_groups(size), work)
    network = results[0][0]
    assert all(found == network for found, _ in results)
    assert network.hosts == tuple(rank // 2 for rank in range(size))
    for a in range(size):
        for b in range(size):
            assert (network.latency[a][b] > 0) == (network.rate[a][b] > 0) == (a != b)
    assert network.message > 0 or size == 1
    assert torch.equal(results[0][1], torch.full((50_000,), float(sum(range(size)))))


def test_links_between_processes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "PAIR_SECONDS", 0.002)
    groups = tcp_groups(3)
    networks = run_ranks(groups, lambda group: measure_network(group, f"host {group.rank}"))
    assert networks[0] == networks[1] == networks[2]
    for group in groups:
        group.close()
