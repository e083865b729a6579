"""Cluster files that describe no cluster, or one that nobody has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tllm.core.errors import ConfigError
from tllm.planner.cluster.cluster_file import parse_cluster

NODE = (
    '[link]\nlatency = 0\nbandwidth = "1 Gbit/s"\n[[node]]\nname = "a"\nmemory = "1 GB"\nmemory_bandwidth = "1 GB/s"\n'
)
INSIDE = 'inside = { latency = 0, bandwidth = "10 Gbit/s" }\n'
FLOPS = 'flops = { float32 = "1 Gflop/s" }\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "big.toml has no node"),
        (NODE + FLOPS + "count = 0", "node 'a' has count = 0"),
        (NODE + FLOPS + "count = 1000000000", "has 1,000,000,000 devices, and at most 1,048,576 are planned"),
        (NODE + FLOPS + "count = 2000\ndevices = 1000", "has 2,000,000 devices, and at most 1,048,576 are planned"),
        (NODE + FLOPS + "count = " + "9" * 5000, "big.toml is not a cluster: Exceeds the limit (4300 digits)"),
        (NODE + FLOPS + f"count = {'9' * 4000}\ndevices = {'9' * 4000}", "has 10^40 or more devices"),
        (NODE + FLOPS + "[[group]]\nlatency = 0\nbandwidth = 1\nsize = -1", "group 'group' has size = -1"),
        ("a = " + "[" * 5000, "big.toml is not a cluster: "),
    ],
)
def test_what_is_no_cluster_is_refused_in_words(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text, Path("big.toml"))
    assert says in caught.value.message and "sys." not in caught.value.message


def test_a_group_may_be_larger_than_all_clusters() -> None:
    group = f"[[group]]\nlatency = 0\nbandwidth = 1\nsize = 1{'0' * 400}"
    assert parse_cluster(NODE + FLOPS + group, Path("one.toml")).tiers[0].group_of == (0,)


def test_count_and_devices_multiply() -> None:
    cluster = parse_cluster(NODE + FLOPS + "count = 3\ndevices = 2\n" + INSIDE, Path("small.toml"))
    assert cluster.names == ("a0", "a1", "a2")
    assert cluster.node_of == (0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize("own", [FLOPS, "efficiency = 0.5", 'operation = "5 us"', "memory_efficiency = 0.5"])
def test_a_speed_beside_a_profile_counts_for_nothing_and_is_refused(own: str) -> None:
    text = f'[[node]]\nname = "a"\nprofile = "a.json"\nmemory = "1 GB"\n{own}\n'
    with pytest.raises(ConfigError, match=f"has a profile and a speed of its own, {own.split()[0]}"):
        parse_cluster(text, Path("big.toml"))


def test_each_speed_of_a_node_comes_to_its_own_field() -> None:
    speeds = 'operation = "5 us"\ndisk = "2 GB/s"\nefficiency = 0.5\nmemory_efficiency = 0.8\n'
    device = parse_cluster(NODE + speeds + FLOPS, Path("small.toml")).devices[0]
    assert (device.operation_seconds, device.disk_bandwidth, device.keys_bandwidth) == (pytest.approx(5e-6), 2e9, 0)
    assert (device.memory_bandwidth, device.peaks) == (8e8, (("float32", 1e9),))
    assert device.matrix_rate("float32", 1) == 5e8
