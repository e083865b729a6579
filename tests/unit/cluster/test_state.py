from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.cluster.kits import facts, joined
from tllm.cluster.heartbeat import describe, fullness, holder, silent
from tllm.cluster.messages import Heartbeat, Loaded, Prepared, Progress
from tllm.cluster.state import (
    ClusterState,
    Event,
    NodeHeard,
    NodeJoined,
    NodeLost,
    Planned,
    RankBroken,
    RankDone,
    RankLoaded,
    RankLoading,
    RankPrepared,
    RankReady,
    apply,
    by_machine,
)
from tllm.spec.plan import Plan

PLAN = Plan.parse("pp=2", 4)
LOADED = Loaded(rank=0, bytes_read=5, fetched=0, seconds=1.0, rss_bytes=9)


def run(state: ClusterState, *events: Event | Planned) -> ClusterState:
    for event in events:
        state = apply(state, event)
    return state


def test_nodes_keep_the_order_in_which_they_joined() -> None:
    assert [member.node for member in joined("b", "a", "c").living] == ["b", "a", "c"]


def test_nodes_of_one_machine_take_ranks_next_to_each_other() -> None:
    """So that the sums of each tensor-parallel stage stay on a machine, in whichever order the nodes came."""
    state = ClusterState(cluster="c")
    for node in ("x1", "y1", "x2", "z1", "y2", "x3"):
        state = apply(state, NodeJoined(node, replace(facts(node), host_name=node[0]), 0.0))
    nodes = [member.node for member in by_machine(state.living)]
    assert nodes == ["x1", "x2", "x3", "y1", "y2", "z1"]
    assert [member.node for member in by_machine(joined("b", "a", "c").living)] == ["b", "a", "c"]
    stages = Plan.parse("pp=3,tp=3+2+1", 6)
    assert [{nodes[rank][0] for rank in stages.ranks(stage)} for stage in range(3)] == [{"x"}, {"y"}, {"z"}]


def test_apply_leaves_the_state_that_it_was_given() -> None:
    state = joined("a")
    apply(state, NodeLost("a", "gone"))
    assert state == joined("a")


def test_a_plan_makes_its_nodes_ranks_and_the_epoch_one_more() -> None:
    state = run(joined("a", "b", "c"), Planned(PLAN, ("c", "a")))
    assert state.epoch == 1
    assert [(m.node, m.rank) for m in state.ranks] == [("c", 0), ("a", 1)]
    assert state.member("b").rank is None  # type: ignore[union-attr]


def test_ready_when_every_rank_is() -> None:
    state = run(joined("a", "b"), Planned(PLAN, ("a", "b")))
    prepared = Prepared(rank=0, pieces=(), parameter_bytes=7)
    for node in ("a", "b"):
        assert not state.is_ready
        state = run(
            state,
            RankPrepared(node, prepared),
            RankLoading(node, Progress(1, 5)),
            RankLoaded(node, LOADED),
            RankReady(node),
        )
    assert state.is_ready
    assert state.ranks[0].parameter_bytes == 7
    assert state.ranks[0].loaded == LOADED
    lost = apply(state, NodeLost("b", "killed"))
    assert not lost.is_ready
    assert [(m.node, m.reason) for m in lost.lost] == [("b", "killed")]


def test_what_a_lost_or_unknown_node_says_changes_nothing() -> None:
    state = run(joined("a"), NodeLost("a", "gone"))
    assert run(state, NodeHeard("a", Heartbeat(stats={"running": 1.0}), 9.0), RankReady("a"), RankReady("x")) == state


def test_a_lost_node_that_joins_again_starts_anew() -> None:
    state = run(joined("a", "b"), Planned(PLAN, ("a", "b")), NodeLost("a", "gone"))
    state = run(state, NodeJoined("a", facts("a"), 3.0))
    assert state.member("a").phase == "joined"  # type: ignore[union-attr]
    assert [m.node for m in state.members] == ["b", "a"]


def test_a_new_plan_forgets_the_lost() -> None:
    state = run(joined("a", "b", "c"), Planned(PLAN, ("a", "b")), NodeLost("b", "gone"), Planned(PLAN, ("a", "c")))
    assert state.epoch == 2
    assert [(m.node, m.phase) for m in state.members] == [("a", "assigned"), ("c", "assigned")]


def test_a_rank_whose_wires_broke_is_not_ready_and_still_there() -> None:
    state = run(joined("a", "b"), Planned(PLAN, ("a", "b")), RankReady("a"), RankReady("b"))
    broken = apply(state, RankBroken("a", "rank 1 went away"))
    assert state.is_ready and not broken.is_ready
    assert [m.node for m in broken.living] == ["a", "b"] and not broken.lost
    assert run(broken, Planned(PLAN, ("a", "b"))).ranks[0].reason == ""


def test_epochs_go_on_where_nodes_had_them_under_another_coordinator() -> None:
    state = run(joined("a"), NodeJoined("b", facts("b"), 1.0, 7, 1), NodeJoined("c", facts("c"), 1.0, 5, 0))
    assert state.epoch == 7
    assert [m.before for m in state.members] == [None, 1, 0]
    assert run(state, Planned(PLAN, ("a", "b"))).epoch == 8


def test_a_plan_for_a_node_that_is_not_here_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        apply(joined("a"), Planned(PLAN, ("a", "b")))


def test_silence_is_measured_from_the_last_heartbeat() -> None:
    state = run(joined("a", "b", at=10.0), NodeHeard("a", Heartbeat(), 14.0))
    assert silent(state, now=15.0, limit=5.0) == ()
    assert [event.node for event in silent(state, now=15.1, limit=5.0)] == ["b"]
    assert {event.node for event in silent(state, now=30.0, limit=5.0)} == {"a", "b"}


def test_a_lost_node_is_not_lost_again() -> None:
    state = run(joined("a"), NodeLost("a", "gone"))
    assert silent(state, now=1e9, limit=5.0) == ()


def test_a_silent_rank_is_named_with_its_layers() -> None:
    state = run(joined("a", "b"), Planned(PLAN, ("b", "a")))
    reasons = [event.reason for event in silent(state, now=7.0, limit=5.0)]
    assert reasons == [
        "node a (rank 1, layers [2, 4)) has been silent for 7.0 s",
        "node b (rank 0, layers [0, 2)) has been silent for 7.0 s",
    ]


@pytest.mark.parametrize(
    ("begun", "expected"),
    [((5, 5, 5), "c"), ((7, 5, 4), "b"), ((5, 4, 4), "a"), ((5, 5, 4), "b"), ((1, 0, 0), "a")],
)
def test_work_waits_for_the_stage_that_has_begun_what_the_next_has_not(begun: tuple[int, ...], expected: str) -> None:
    state = run(joined("a", "b", "c"), Planned(Plan.parse("pp=3", 3), ("a", "b", "c")))
    for node, count in zip("abc", begun, strict=True):
        state = run(state, NodeHeard(node, Heartbeat(stats={"batches": float(count)}), 1.0))
    assert holder(state) == expected
    assert holder(joined("a")) == ""


def test_a_node_that_goes_with_its_memory_full_is_said_to() -> None:
    state = run(joined("a", "b"), NodeHeard("a", Heartbeat(rss_bytes=int(0.95 * 2**30)), 1.0))
    assert fullness(state, "a") == f"; its process held {int(0.95 * 2**30)} bytes of the machine's {2**30}"
    assert fullness(state, "b") == fullness(state, "x") == ""


names = st.sampled_from(["a", "b", "c"])
events = st.one_of(
    st.builds(lambda node, at: NodeJoined(node, facts(node), at), names, st.floats(0, 100)),
    st.builds(lambda node, at: NodeHeard(node, Heartbeat(), at), names, st.floats(0, 100)),
    st.builds(NodeLost, names, st.just("gone")),
    st.builds(RankReady, names),
    st.builds(lambda node: RankLoaded(node, LOADED), names),
)


@given(st.lists(events, max_size=30))
def test_whatever_happens_names_are_unique_and_the_lost_stay_lost(history: list[Event]) -> None:
    state = ClusterState(cluster="c")
    for event in history:
        before = {member.node for member in state.members if not member.is_living}
        state = apply(state, event)
        known = [member.node for member in state.members]
        assert len(known) == len(set(known))
        back = before - {member.node for member in state.members if not member.is_living}
        assert back <= ({event.node} if isinstance(event, NodeJoined) else set())


planned = st.builds(Planned, st.just(PLAN), st.permutations(["a", "b", "c"]).map(tuple))
done = st.builds(RankDone, names)
returned = st.builds(
    lambda node, rank: NodeJoined(node, facts(node), 0.0, 3, rank), names, st.none() | st.integers(0, 2)
)


@given(st.lists(st.one_of(events, done, planned, returned), max_size=40))
def test_what_is_counted_is_what_the_members_say(history: list[Event | Planned]) -> None:
    """Against counting all members each time."""
    state = ClusterState(cluster="c")
    for event in history:
        if isinstance(event, Planned) and {"a", "b", "c"} - {member.node for member in state.living}:
            continue
        state = apply(state, event)
        seated = [m for m in state.members if state.plan and m.rank is not None and m.rank < state.plan.world_size]
        assert state.living_count == len(state.living)
        assert state.returned_count == sum(member.before is not None for member in state.living)
        assert sorted(m.node for m in state.seated) == sorted(m.node for m in seated)
        is_ready = state.plan is not None and len(seated) == 2 and all(m.phase in ("ready", "done") for m in seated)
        assert state.is_ready == is_ready
        assert state.is_done == (bool(seated) and all(m.phase == "done" for m in seated))


def test_a_step_is_seen_by_the_batches_that_a_heartbeat_counts() -> None:
    state = joined("a", at=1.0)
    for at, batches, stepped in [(2.0, 5.0, 2.0), (3.0, 5.0, 2.0), (4.0, 6.0, 4.0)]:
        state = apply(state, NodeHeard("a", Heartbeat(stats={"batches": batches}), at))
        member = state.member("a")
        assert member is not None
        assert (member.heard, member.stepped) == (at, stepped)


def test_nodes_beyond_the_plan_lend_what_they_have_and_are_not_waited_for() -> None:
    state = ClusterState(cluster="test")
    for node in "abc":
        state = apply(state, NodeJoined(node, facts(node), 0.0))
    state = apply(state, Planned(Plan.parse("pp=2", 4), ("a", "c", "b")))
    assert [member.node for member in state.ranks] == ["a", "c", "b"]
    assert [member.node for member in state.seated] == ["a", "c"]
    assert describe(state, "b") == "node b (no rank)"
    for node in "ac":
        state = apply(state, RankReady(node))
    assert state.is_ready
    state = apply(state, NodeLost("b", "gone"))
    assert state.is_ready and [member.node for member in state.lost] == ["b"]
    for node in "ac":
        state = apply(state, RankDone(node))
    assert state.is_done
