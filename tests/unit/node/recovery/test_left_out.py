"""Which nodes an epoch is begun without, by what each said that it could not take its part for."""

from __future__ import annotations

from tests.unit.cluster.kits import joined
from tllm.cluster.state import ClusterState, NodeJoined, NodeLost, Planned, RankRefused, apply
from tllm.node.recovery.left_out import AGAIN_SECONDS, MOST_SECONDS, LeftOut
from tllm.spec.plan import Plan


def epoch(nodes: str, refused: dict[str, str | None], lost: str = "") -> ClusterState:
    """Nodes with a rank each in their order, of which some refused for another, or for themselves (None)."""
    state = apply(joined(*nodes), Planned(Plan.parse(f"pp={len(nodes)}", len(nodes)), tuple(nodes)))
    for node, peer in refused.items():
        state = apply(state, RankRefused(node, f"{node} said no", None if peer is None else nodes.index(peer)))
    for node in lost:
        state = apply(state, NodeLost(node, "gone"))
    return state


def left_out(nodes: str, refused: dict[str, str | None], lost: str = "") -> str:
    made = LeftOut(lambda: 0.0, lambda: nodes)
    made.add(epoch(nodes, refused, lost).ranks)
    return "".join(sorted(made.nodes()))


def test_who_fails_by_itself_is_left_out_and_those_that_waited_for_it_are_not() -> None:
    assert left_out("abc", {"b": None}) == "b"
    assert left_out("abc", {"a": "b", "b": None, "c": "b"}) == "b"


def test_who_cannot_work_with_several_is_left_out_and_not_each_of_these() -> None:
    assert left_out("abcde", {"a": "b", "b": "c", "c": "b"}) == "b"
    assert left_out("abcde", {"b": "a", "c": "b"}) == "b", "whoever refuses, and whoever tells of it"


def test_of_two_that_cannot_work_together_the_younger_is_left_out() -> None:
    assert left_out("ab", {"a": "b", "b": "a"}) == "b"
    assert left_out("abcd", {"c": "b"}) == "c"


def test_what_is_said_of_a_lost_node_is_a_consequence() -> None:
    assert left_out("abc", {"a": "b", "c": "b"}, lost="b") == ""


def test_a_rank_that_is_not_there_is_nobodys_fault() -> None:
    state = apply(epoch("ab", {}), RankRefused("a", "no", 7))
    made = LeftOut(lambda: 0.0, lambda: "ab")
    made.add(state.ranks)
    assert not made.nodes()


def test_a_node_that_has_come_anew_has_no_rank_and_shifts_nobodys() -> None:
    """b refused c, and a came back by its name before that was looked at."""
    state = epoch("abcd", {"b": "c"})
    member = state.member("a")
    assert member is not None
    state = apply(apply(state, NodeLost("a", "gone")), NodeJoined("a", member.facts, 1.0))
    made = LeftOut(lambda: 0.0, lambda: "abcd")
    made.add(state.ranks)
    assert list(made.nodes()) == ["c"]


def test_a_wrong_guess_is_put_right_by_the_next_epoch() -> None:
    """b trusts nobody, and in the first epoch only c was soon enough to say so."""
    made = LeftOut(lambda: 0.0, lambda: "abcd")
    made.add(epoch("abcd", {"c": "b"}).ranks)
    assert dict(made.nodes()) == {"c": "c said no"}
    made.add(epoch("abd", {"b": "d"}).ranks)
    assert list(made.nodes()) == ["b"]


def test_who_was_left_out_may_try_again_and_less_often_each_time() -> None:
    now = [0.0]
    made = LeftOut(lambda: now[0], lambda: "ab")
    seconds = AGAIN_SECONDS
    for _ in range(9):
        made.note("b", "no room")
        made.note("b", "said again of the same epoch")
        now[0] += seconds - 0.1
        assert dict(made.nodes()) == {"b": "no room"}
        now[0] += 0.2
        assert not made.nodes()
        seconds = min(2 * seconds, MOST_SECONDS)
    made.note("b", "no room")
    made.forget("b")
    assert not made.nodes(), "one that comes anew by this name has done nothing yet"
