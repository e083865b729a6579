"""A step of every rank: the replicas that stand for others against all of them played, and 16,384 ranks at once."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.properties import examples
from tests.unit.planner.simulate.test_training_step import SPEC
from tllm.planner.cluster.cluster_file import parse_cluster
from tllm.planner.cluster.device import Cluster, Device, LinkSpeed
from tllm.planner.cluster.execution import Execution
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.simulate.large_cluster import device_order, play_ranks
from tllm.planner.simulate.placed_plan import PlacedLinks, PlacedPlan
from tllm.spec.model_spec import LayerSpec, ModelSpec, MoeSpec
from tllm.spec.pipeline_schedule import build
from tllm.spec.plan import Coordinates, Plan
from tllm.spec.process_groups import SERVERS, computing, members

TEXT = """
[link]
latency = "20 us"
bandwidth = "1 GB/s"
[[node]]
name = "box"
count = {count}
devices = {devices}
memory = "80 GB"
memory_bandwidth = "100 GB/s"
flops = {{ float32 = "1 Tflop/s" }}
inside = {{ latency = "5 us", bandwidth = "20 GB/s" }}
[[group]]
name = "rack"
size = 4
latency = "10 us"
bandwidth = "5 GB/s"
[execution]
collectives = "levels"
beside = {{ tp = 0.5 }}
slowdown = 1.2
"""


def cluster_of(count: int, devices: int) -> Cluster:
    return parse_cluster(TEXT.format(count=count, devices=devices), Path("big.toml"))


def placed(text: str, cluster: Cluster, batch: int, spec: ModelSpec = SPEC) -> PlacedPlan:
    plan = Plan.parse(text, spec.num_layers)
    facts = TrainingFacts(64, batch)
    return PlacedPlan(spec, plan, facts, cluster, tuple(range(plan.world_size)), execution=cluster.execution)


def uneven(cluster: Cluster) -> Cluster:
    """Every third device half as fast."""
    slow = replace(cluster.devices[0], flop_rates=(("float32", ((1.0, 5e11),)),))
    return replace(cluster, devices=tuple(slow if i % 3 == 2 else one for i, one in enumerate(cluster.devices)))


EXPERTS = replace(SPEC, layers=(LayerSpec(SPEC.layers[0].rope, moe=MoeSpec(6, 2, 32)),) * 8)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("pp=2,tp=2,dp=4,sequence=true,zero=2", SPEC),
        ("pp=4,dp=4,schedule=zero_bubble", SPEC),
        ("pp=2,dp=8,chunks=2,zero=1", SPEC),
        ("dp=8,cp=2,zero=3,recompute=layer", SPEC),
        ("dp=3:2:1:1,pp=4", SPEC),
        ("pp=2,dp=8,ep=4,experts=spread", EXPERTS),
    ],
)
@pytest.mark.parametrize("even", [True, False])
def test_those_that_stand_for_others_take_as_long(text: str, spec: ModelSpec, even: bool) -> None:
    cluster = cluster_of(8, 2) if even else uneven(cluster_of(8, 2))
    some = placed(text, cluster, 24, spec)
    played = play_ranks(some)
    everyone = placed(text, cluster, 24, spec)
    object.__setattr__(everyone, "stands_for", list(range(everyone.plan.replicas)))
    whole = play_ranks(everyone)
    assert played.prediction.seconds == pytest.approx(whole.prediction.seconds, rel=1e-12)
    for rank in range(some.plan.replicas * some.plan.replica_size):
        assert played.spans(rank) == whole.spans(rank)
        assert played.time(rank) == pytest.approx(whole.time(rank), rel=1e-12, abs=1e-15)
        assert sum(played.time(rank)) == pytest.approx(played.prediction.seconds, rel=1e-9)
    assert played.ops == whole.ops
    assert some.bytes_of_all(played.prediction) == sum(traffic.total for traffic in whole.prediction.bytes_sent)


def test_ranks_play_the_lists_that_the_trainer_executes() -> None:
    played = play_ranks(placed("pp=4,tp=2,dp=2,schedule=zero_bubble,depth=2", cluster_of(8, 2), 12))
    lists = build("zero_bubble", 4, 6, 2).lists
    for rank in range(16):
        stage = played.placed.plan.coordinates(rank).stage
        assert [span.op for span in played.spans(rank)] == list(lists[stage])
    assert played.ops == 2 * 2 * sum(map(len, lists))


LINKED = ("pp=2,tp=2,dp=4", "dp=4,cp=2,tp=2", "pp=2,dp=8,ep=4,experts=spread", "dp=6,servers=3")


@settings(max_examples=examples(40))
@given(st.sampled_from(LINKED[:3]), st.integers(0, 2), st.floats(1, 100), st.sampled_from(["flat", "levels"]))
def test_a_faster_link_or_device_never_takes_longer(text: str, which: int, more: float, how: Any) -> None:
    cluster = cluster_of(8, 2)
    execution = replace(cluster.execution, collectives=how)
    changes: list[dict[str, Any]] = [
        {"default": LinkSpeed(2e-5 / more, 1e9 * more)},
        {"tiers": (replace(cluster.tiers[0], link=LinkSpeed(1e-5 / more, 5e9 * more)),)},
        {"devices": (replace(cluster.devices[0], flop_rates=(("float32", ((1.0, 1e12 * more),)),)),) * 16},
    ]
    before, after = (
        play_ranks(placed(text, replace(one, execution=execution), 24, EXPERTS)).prediction.seconds
        for one in (cluster, replace(cluster, **changes[which]))
    )
    assert after <= before * (1 + 1e-12)


@pytest.mark.parametrize("text", LINKED)
def test_a_link_known_of_one_member_is_that_of_all(text: str) -> None:
    """Each node has another link inside, each pair of nodes another between."""
    even = cluster_of(8, 2)
    pairs = [(a, b) for a in range(8) for b in range(8) if a != b]
    cluster = replace(
        even,
        inside=tuple(LinkSpeed(node * 1e-6, 1e9 + node) for node in range(8)),
        pairs=tuple((pair, LinkSpeed(1e-5, 1e8 + number)) for number, pair in enumerate(pairs)),
    )
    plan = Plan.parse(text, EXPERTS.num_layers)
    on = PlacedPlan(EXPERTS, plan, TrainingFacts(64, 8), cluster, tuple(range(plan.world_size)))
    links = PlacedLinks(on)
    for rank in computing(plan):
        servers = [rank, *range(len(computing(plan)), plan.world_size)]
        for name, ranks in (members(plan, rank) | {SERVERS: servers}).items():
            if name not in ("world", "save"):
                assert links.of(rank, name) == cluster.slowest_link(ranks), (rank, name)


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "shared"),
    [
        ("pp=4", 4, 1, [1, 2]),
        ("pp=4", 2, 2, []),  # a neighbour of each stage is on its own node
        ("pp=4", 1, 4, []),
        ("pp=3,tp=1+2+1", 4, 1, [1]),
        ("pp=4,schedule=interleaved,chunks=2", 4, 1, [0, 1, 2, 3]),
        ("pp=2,schedule=interleaved,chunks=2", 2, 1, []),  # one neighbour
        ("pp=2,dp=2", 4, 1, []),
    ],
)
def test_what_leaves_a_node_both_ways_shares_its_port(text: str, nodes: int, devices: int, shared: list[int]) -> None:
    on = placed(text, cluster_of(nodes, devices), 8)
    assert [sorted(PlacedLinks(on).one_port(replica)) for replica in on.replicas] == [shared] * len(on.replicas)


def test_stages_of_all_replicas_lie_together_or_replicas_do() -> None:
    plan = Plan.parse("pp=2,tp=1+2,cp=2,dp=3,layers=4", SPEC.num_layers)
    assert device_order(plan, "replicas") == tuple(range(18))
    placed_on = device_order(plan, "stages")
    walked = [
        plan.rank_of(Coordinates(replica, stage, cp, tp))
        for stage in range(2)
        for replica in range(3)
        for cp in range(2)
        for tp in range(plan.stages[stage].tp)
    ]
    assert [placed_on[rank] for rank in walked] == list(range(18))


def test_near_replicas_sum_faster_and_far_stages_hop_slower() -> None:
    """Two replicas of four stages on four nodes of two devices."""
    cluster, facts = cluster_of(4, 2), TrainingFacts(64, 8)
    plan = Plan.parse("pp=4,dp=2,layers=2", SPEC.num_layers)
    near, far = (
        play_ranks(
            PlacedPlan(SPEC, plan, facts, cluster, device_order(plan, order), execution=cluster.execution)
        ).replicas[0]
        for order in ("stages", "replicas")
    )
    assert near.gradients < far.gradients
    assert near.timeline is not None and far.timeline is not None
    assert near.timeline.total > far.timeline.total


@pytest.mark.parametrize(
    "text", ["pp=8,tp=8,dp=256,sequence=true,zero=2", "pp=4,tp=8,cp=16,dp=32,chunks=2,zero=1", "dp=16384,zero=3"]
)
def test_16384_ranks(text: str) -> None:
    """Well within this test's time limit; the same twice."""
    cluster = cluster_of(2048, 8)
    one, two = (play_ranks(placed(text, cluster, 16384)) for _ in range(2))
    assert one.ranks == 16384 and len(one.replicas) == 1
    assert one.prediction.seconds == two.prediction.seconds
    assert one.time(16383) == two.time(16383)
    assert one.ops >= 16384


def test_collectives_by_levels_and_messages_beside_products_gain() -> None:
    """With no latency: of short messages a level costs more than it saves."""
    text = re.sub('latency = "[^"]*"', "latency = 0", TEXT)
    cluster = parse_cluster(text.format(count=8, devices=2), Path("big.toml"))
    flat = replace(cluster, execution=Execution())
    texts = "dp=16,zero=2", "dp=16", "tp=4,dp=4,zero=1"
    for text in texts:
        assert play_ranks(placed(text, cluster, 16)).prediction.seconds < (
            play_ranks(placed(text, flat, 16)).prediction.seconds
        )


def test_without_an_execution_it_is_as_planned() -> None:
    """`tllm plan` counts products alone, at one rate."""
    cluster = Cluster(
        ("a", "b"), (Device(2**33, (("float32", ((1, 1e9),)),), 1e9),) * 2, (0, 1), (None, None), LinkSpeed()
    )
    plan = Plan.parse("pp=2", SPEC.num_layers)
    played = play_ranks(PlacedPlan(SPEC, plan, TrainingFacts(64, 4), cluster, (0, 1)))
    assert played.time(0).memory == 0
    assert played.prediction.seconds == PlacedPlan(SPEC, plan, TrainingFacts(64, 4), cluster, (0, 1)).predict().seconds
