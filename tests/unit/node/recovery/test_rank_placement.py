from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tllm.node.recovery.rank_placement import RankPlacement


def test_the_first_have_their_ranks_and_others_follow_as_they_join() -> None:
    assert RankPlacement(3, ["x"]).fill(["b", "a", "x", "late"]) == {0: "x", 1: "b", 2: "a"}


def test_a_node_keeps_its_rank_while_others_go_and_come() -> None:
    seats = RankPlacement(3)
    assert seats.fill(["a", "b", "c"]) == {0: "a", 1: "b", 2: "c"}
    assert seats.fill(["a", "c"]) == {0: "a", 2: "c"}
    assert seats.fill(["a", "c", "d", "b"]) == {0: "a", 1: "b", 2: "c"}, "a rank that is free is its node's again"
    assert seats.fill(["a", "c", "d"]) == {0: "a", 1: "d", 2: "c"}
    assert seats.fill(["a", "c", "d", "b"]) == {0: "a", 1: "d", 2: "c"}, "one that is taken is not"
    assert seats.fill(["c", "d", "b"]) == {0: "b", 1: "d", 2: "c"}


def test_nodes_of_another_coordinator_have_the_ranks_that_they_had() -> None:
    wishes = {"a": 2, "b": 0, "c": 0, "d": 7}
    assert RankPlacement(4).fill(["a", "c", "b", "d"], wishes) == {0: "c", 1: "b", 2: "a", 3: "d"}
    seats = RankPlacement(2)
    seats.fill(["a", "b"])
    assert seats.fill(["b", "a"], {"b": 0, "a": 1}) == {0: "a", 1: "b"}, "what is had here counts more"


nodes = st.lists(st.sampled_from("abcdef"), unique=True, max_size=6)


@given(st.integers(1, 5), st.lists(nodes, max_size=6))
def test_every_rank_that_can_be_taken_is_and_nobody_moves(ranks: int, history: list[list[str]]) -> None:
    seats = RankPlacement(ranks)
    before: dict[int, str] = {}
    for living in history:
        taken = seats.fill(living)
        assert len(taken) == len(set(taken.values())) == min(ranks, len(living))
        assert list(taken) == sorted(taken)
        assert set(taken) <= set(range(ranks)) and set(taken.values()) <= set(living)
        assert all(taken[rank] == node for rank, node in before.items() if node in living)
        before = taken
