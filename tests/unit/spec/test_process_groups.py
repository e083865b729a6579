"""Every axis groups the ranks that differ on it alone; wires join what the groups and pipelines need."""

from __future__ import annotations

import itertools

import pytest

from tllm.spec.plan import Plan, Wire
from tllm.spec.process_groups import members, neighbours, wires

PLANS = ["dp=2,pp=2,tp=2", "dp=4,ep=2,cp=2,tp=1", "dp=2,pp=2,cp=2,tp=1+2", "pp=3,tp=2+1+3", "pp=2,chunks=2"]


@pytest.mark.parametrize("text", PLANS)
def test_all_members_agree_on_their_group(text: str) -> None:
    plan = Plan.parse(text, 8)
    of_ranks = [members(plan, rank) for rank in range(plan.world_size)]
    for rank, groups in enumerate(of_ranks):
        for name, group in groups.items():
            assert group.count(rank) == 1 and len(set(group)) == len(group)
            assert all(of_ranks[other][name] == group for other in group)


@pytest.mark.parametrize("text", PLANS)
def test_groups_differ_on_their_axis_alone(text: str) -> None:
    plan = Plan.parse(text, 8)
    differs = {
        "tp": (3,),
        "cp": (2,),
        "dp": (0, 2),
        "ep": (0,),
        "edp": (0, 2),
        "replica": (1, 3),
        "world": (0, 1, 2, 3),
    }
    for rank in range(plan.world_size):
        groups = members(plan, rank)
        for name, free in differs.items():
            for other in groups[name]:
                pairs = zip(plan.coordinates(rank), plan.coordinates(other), strict=True)
                assert all(a == b or axis in free for axis, (a, b) in enumerate(pairs))
        assert len(groups["dp"]) == plan.replicas * plan.cp
        assert len(groups["ep"]) * len(groups["edp"]) == len(groups["dp"])
        assert set(groups["ep"]) & set(groups["edp"]) == {rank}


def test_experts_are_spread_over_replicas_in_a_row() -> None:
    plan = Plan.parse("dp=4,ep=2", 8)
    assert [members(plan, rank)["ep"] for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [members(plan, rank)["edp"] for rank in range(4)] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_wires_go_both_ways_and_come_once() -> None:
    found = wires(Plan.parse("dp=2,pp=2,tp=2", 8))
    assert len(set(found)) == len(found)
    assert {Wire(b, a, name) for a, b, name in found} - set(found) == {Wire(a, 0, "data") for a in range(1, 8)}
    assert {(a, b) for a, b, name in found if name == "tp"} == {(a, a ^ 1) for a in range(8)}
    assert {(a, b) for a, b, name in found if name == "dp"} == {(a, a ^ 4) for a in range(8)}
    assert {(a, b) for a, b, name in found if name == "pp"} == {(a, a ^ 2) for a in range(8)}
    assert {(a, b) for a, b, name in found if name == "world"} == set(itertools.permutations(range(8), 2))


def test_an_unequal_pipeline_feeds_every_rank_once() -> None:
    found = [wire for wire in wires(Plan.parse("pp=2,tp=2+3", 8)) if wire.name == "pp"]
    assert sorted(wire.target for wire in found) == [0, 1, 2, 3, 4]
    assert {(a, b) for a, b, _ in found if a < 2} == {(0, 2), (1, 3), (0, 4)}


def test_chunks_close_the_pipeline_to_a_ring() -> None:
    assert neighbours(Plan.parse("pp=3", 8)) == [(0, 1), (1, 2)]
    assert neighbours(Plan.parse("pp=3,chunks=2", 8)) == [(0, 1), (1, 2), (2, 0)]


def test_servers_are_joined_to_every_replica_and_save_with_everybody() -> None:
    plan = Plan.parse("dp=2,servers=2", 8)
    found = wires(plan)
    assert {name for a, b, name in found if max(a, b) > 1} == {"servers", "save"}
    assert {(a, b) for a, b, name in found if name == "save"} == set(itertools.permutations(range(4), 2))
    assert members(plan, 3) == {"save": [0, 1, 2, 3]}
    assert members(plan, 1)["world"] == [0, 1] and members(plan, 1)["save"] == [0, 1, 2, 3]
    of_servers = {(a, b) for a, b, name in found if name == "servers"}
    assert of_servers == {(w, s) for w in (0, 1) for s in (2, 3)} | {(s, w) for w in (0, 1) for s in (2, 3)}
