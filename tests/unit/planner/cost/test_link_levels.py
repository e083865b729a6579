"""Collectives by levels: the link that stands for them against bytes counted level by level."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm.planner.cluster.device import Cluster, Device, LinkSpeed, Tier
from tllm.planner.cost.link_levels import exchange_link, gather_link, levels

DEVICE = Device(2**30, (("float32", ((1, 1e9),)),), 1e9)


def cluster(nodes: int, each: int, rack: int, inside: LinkSpeed, near: LinkSpeed, far: LinkSpeed) -> Cluster:
    return Cluster(
        tuple(f"n{i}" for i in range(nodes)),
        (DEVICE,) * (nodes * each),
        tuple(i // each for i in range(nodes * each)),
        (inside,) * nodes,
        far,
        (Tier("rack", tuple(i // rack for i in range(nodes)), near),),
    )


INSIDE, NEAR, FAR = LinkSpeed(1e-6, 400e9), LinkSpeed(1e-5, 50e9), LinkSpeed(1e-4, 10e9)


def test_levels_are_found_inside_out() -> None:
    machines = cluster(8, 4, 4, INSIDE, NEAR, FAR)
    assert levels(machines, range(32)) == [(4, 1, INSIDE), (4, 4, NEAR), (2, 16, FAR)]
    assert levels(machines, [0, 4, 8, 12]) == [(4, 1, NEAR)]
    assert levels(machines, [0, 1, 16, 17]) == [(2, 1, INSIDE), (2, 2, FAR)]
    assert levels(machines, [3]) == []
    assert levels(machines, [0, 1, 2, 3, 4]) == [(4, 1, INSIDE), (2, 1, NEAR)], "one node has but one of them"


def test_what_crosses_a_slow_link_is_shared_by_the_ranks_below_it() -> None:
    """32 ranks gather 32 GB: 3/4 of it inside at 400 GB/s, 3/4 over four at 50, 1/2 over 16 at 10."""
    link = gather_link(cluster(8, 4, 4, INSIDE, NEAR, FAR), range(32))
    seconds = 0.75 * 32 / 400 + 0.75 * 32 / 4 / 50 + 0.5 * 32 / 16 / 10
    assert 31 / 32 * 32e9 / link.bandwidth == pytest.approx(seconds)
    assert link.latency == pytest.approx(1.11e-4)


def test_an_exchange_keeps_each_link_to_what_goes_beyond_it() -> None:
    """Of 31 parts 3 stay inside, 12 go to the rack, 16 to the other: these take longest."""
    link = exchange_link(cluster(8, 4, 4, INSIDE, NEAR, FAR), range(32))
    assert 31e9 / link.bandwidth == pytest.approx(16e9 / 10e9)
    assert link.latency == FAR.latency


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1e9, 3e9]))
def test_over_equal_links_levels_gain_nothing(nodes: int, each: int, rack: int, speed: float) -> None:
    """The shares of the levels add up to (n - 1) / n wherever groups are equal."""
    same = LinkSpeed(0, speed)
    machines = cluster(nodes * rack, each, rack, same, same, same)
    ranks = nodes * rack * each
    if ranks > 1:
        assert gather_link(machines, range(ranks)).bandwidth == pytest.approx(speed, rel=1e-12)
        assert exchange_link(machines, range(ranks)).bandwidth >= speed * (1 - 1e-12)


@given(st.lists(st.integers(0, 31), min_size=2, max_size=12, unique=True))
def test_levels_are_never_slower_than_their_slowest_link(devices: list[int]) -> None:
    machines = cluster(8, 4, 4, INSIDE, NEAR, FAR)
    slowest = machines.slowest_link(devices)
    assert exchange_link(machines, devices).bandwidth >= slowest.bandwidth * (1 - 1e-12)
    sizes = {sum(machines.node_of[a] == machines.node_of[b] for b in devices) for a in devices}
    if sizes == {1}:
        racks = [machines.node_of[a] // 4 for a in devices]
        if len({racks.count(one) for one in racks}) == 1:
            assert gather_link(machines, devices).bandwidth >= slowest.bandwidth * (1 - 1e-12)
