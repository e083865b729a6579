"""Who is silent, and how a node is named by its part."""

from __future__ import annotations

import pytest

from tllm.cluster.heartbeat import (
    BEAT_SECONDS,
    LATE_SECONDS,
    HeartbeatInterval,
    check_lost_after,
    describe,
    overfull,
    silent,
)
from tllm.cluster.messages import Heartbeat, NodeFacts
from tllm.cluster.state import ClusterState, NodeHeard, NodeJoined, Planned, apply
from tllm.core.errors import ConfigError
from tllm.spec.plan import Plan


def cluster(plan: str, layers: int = 6) -> ClusterState:
    made, state = Plan.parse(plan, layers), ClusterState(cluster="c")
    nodes = tuple(f"n{rank}" for rank in range(made.world_size))
    for node in nodes:
        facts = NodeFacts(node=node, host_name=node, memory_bytes=1, cores=1, host="h", port=1)
        state = apply(state, NodeJoined(node, facts, 10.0))
    return apply(state, Planned(made, nodes))


@pytest.mark.parametrize(
    ("plan", "rank", "words"),
    [
        ("pp=2", 1, "node n1 (rank 1, layers [3, 6))"),
        ("dp=2,pp=2", 2, "node n2 (rank 2, layers [0, 3))"),
        ("pp=2,chunks=3", 1, "node n1 (rank 1, layers [1, 2) and [3, 4) and [5, 6))"),
        ("dp=2,servers=1", 1, "node n1 (rank 1, layers [0, 6))"),
        ("dp=2,servers=1", 2, "node n2 (rank 2, a server)"),
    ],
)
def test_a_node_is_named_by_its_part(plan: str, rank: int, words: str) -> None:
    assert describe(cluster(plan), f"n{rank}") == words
    assert describe(cluster(plan), "stranger") == "node stranger"


def test_silence_is_told_with_the_part() -> None:
    state = cluster("pp=2")
    assert silent(state, 14.0, 5.0) == ()
    assert [lost.reason for lost in silent(state, 16.0, 5.0)] == [
        f"node n{rank} (rank {rank}, layers [{3 * rank}, {3 * rank + 3})) has been silent for 6.0 s" for rank in (0, 1)
    ]


@pytest.mark.parametrize("seconds", [0.0, 1.9, -1.0, float("inf"), float("nan")])
def test_nobody_is_lost_before_late(seconds: float) -> None:
    with pytest.raises(ConfigError, match=f"after {seconds:g} s .* every {BEAT_SECONDS:g} s, .* {LATE_SECONDS:g} s"):
        check_lost_after(seconds)
    check_lost_after(LATE_SECONDS)


def holding(is_given: bool, is_shared: bool, *held: int, uncounted: int = 0) -> dict[str, str]:
    """What is said of nodes on one machine that were given 100 bytes."""
    state = ClusterState(cluster="c")
    for number, count in enumerate(held):
        facts = NodeFacts(
            node=f"n{number}",
            host_name="box",
            memory_bytes=100,
            cores=1,
            host="h",
            port=1,
            is_given=is_given,
            is_shared=is_shared,
            uncounted_bytes=uncounted,
        )
        state = apply(
            apply(state, NodeJoined(facts.node, facts, 0.0)), NodeHeard(facts.node, Heartbeat(rss_bytes=count), 1.0)
        )
    return overfull(state)


def test_nodes_that_take_more_than_they_were_given_are_named_with_both_numbers() -> None:
    assert holding(True, False, 100, 100) == {}
    assert holding(True, False, 100, 101) == {"n1": "node n1 holds 101 bytes of memory and was given 100"}
    assert holding(True, False, 100, 140, uncounted=40) == {}, "a large build of torch is no part of a plan"
    assert holding(True, True, 60, 40) == {}
    assert holding(True, True, 60, 41) == {
        "n0": "node n0 holds 60 bytes of memory, all nodes there 101, and was given 100",
        "n1": "node n1 holds 41 bytes of memory, all nodes there 101, and was given 100",
    }
    assert holding(False, True, 1000) == {}, "it was given nothing to keep to"


@pytest.mark.parametrize(
    ("nodes", "seconds", "late", "asked", "lost"),
    [
        (1, 0.5, 2, 5, 5),
        (2000, 0.5, 2, 5, 5),
        (2001, 1, 3, 5, 5),
        (10_000, 2.5, 7.5, 5, 10),
        (16_384, 4.5, 13.5, 9, 18),
    ],
)
def test_with_very_many_nodes_each_beats_less_often(
    nodes: int, seconds: float, late: float, asked: float, lost: float
) -> None:
    interval = HeartbeatInterval()
    interval.grow(nodes)
    assert (interval.seconds, interval.late_after, interval.asked_after, interval.lost_after) == (
        seconds,
        late,
        asked,
        lost,
    )
    assert nodes / interval.seconds <= 4000


def test_nodes_that_are_to_come_count_and_an_interval_never_shrinks() -> None:
    interval = HeartbeatInterval(lost_after=60.0)
    interval.expected = 4000
    interval.grow(1)
    assert (interval.seconds, interval.lost_after) == (1.0, 60.0)
    interval.expected = 0
    interval.grow(10)
    assert interval.seconds == 1.0
