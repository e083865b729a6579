from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm.planner.search.replan import training_plans_on
from tllm.spec.plan import Plan

LAYERS = 12


@pytest.mark.parametrize(
    ("text", "left", "expected", "ranks"),
    [
        ("dp=3", {0, 2}, "pp=1,tp=1,layers=12,dp=2", (0, 2)),
        ("dp=3:1:2,zero=3", {1, 2}, "pp=1,tp=1,layers=12,dp=1:2,zero=3", (1, 2)),
        ("dp=3:1,zero=1", {1}, "pp=1,tp=1,layers=12,zero=1", (1,)),
        ("dp=2,pp=2", {0, 1, 2}, "pp=2,tp=1+1,layers=6+6", (0, 1)),
        ("dp=2,pp=2", {0, 3}, "pp=2,tp=1+1,layers=6+6", (0, 3)),
        ("dp=2,pp=2", {1, 3}, "pp=2,tp=1+1,layers=6+6", (3, 1)),
        ("dp=3,pp=2,layers=4+8", {0, 1, 3, 4, 5}, "pp=2,tp=1+1,layers=4+8,dp=2", (0, 1, 4, 5)),
        ("pp=3", {0, 2}, "pp=2,tp=1+1,layers=6+6", (0, 2)),
        ("pp=2,tp=2,sequence=true,recompute=layer", {0, 1, 3}, "pp=2,tp=2+1,layers=8+4,recompute=layer", (0, 1, 3)),
        ("pp=2,cp=2", {0, 1, 2}, "pp=2,tp=1+1,layers=6+6", (0, 2)),
        ("pp=2,cp=2", {0, 1}, "pp=2,tp=1+1,layers=6+6", (0, 1)),
        ("pp=2,chunks=2", {1}, "pp=1,tp=1,layers=12", (1,)),
        ("dp=4,ep=2", {0, 1, 2}, "pp=1,tp=1,layers=12,dp=3", (0, 1, 2)),
        ("dp=3,servers=2", {0, 2, 4}, "pp=1,tp=1,layers=12,dp=2,servers=1", (0, 2, 4)),
        ("dp=2,pp=2", {0, 1, 2, 3}, "pp=2,tp=1+1,layers=6+6,dp=2", (0, 1, 2, 3)),
    ],
)
def test_what_changes_least_comes_first(text: str, left: set[int], expected: str, ranks: tuple[int, ...]) -> None:
    plan, taken = next(training_plans_on(Plan.parse(text, LAYERS), left))
    assert (str(plan), taken) == (expected, ranks)


@pytest.mark.parametrize(("text", "left"), [("dp=2", set()), ("dp=2,servers=1", {0, 1}), ("dp=2,servers=1", {2})])
def test_nothing_goes_on_without_ranks_or_servers(text: str, left: set[int]) -> None:
    assert list(training_plans_on(Plan.parse(text, LAYERS), left)) == []


def test_smaller_plans_follow_for_what_cannot_be() -> None:
    found = [str(plan) for plan, _ in training_plans_on(Plan.parse("dp=3,tp=2,zero=3", LAYERS), {0, 1, 2, 3, 4})]
    one = "pp=1,tp=2,layers=12"
    assert found == [f"{one},dp=2,zero=3", f"{one},zero=3", one, "pp=1,tp=1,layers=12"]


texts = st.builds(
    "dp={},pp={},tp={},cp={},zero={},chunks={}".format,
    *(st.integers(1, 3) for _ in range(4)),
    st.integers(0, 3),
    st.just(1),
)


@given(texts, st.data())
def test_each_is_a_plan_for_living_ranks(text: str, data: st.DataObject) -> None:
    plan = Plan.parse(text, LAYERS)
    left = data.draw(st.sets(st.integers(0, plan.world_size - 1), min_size=1))
    sizes = []
    for smaller, ranks in training_plans_on(plan, left):
        smaller.check(LAYERS)
        assert smaller.world_size == len(ranks) == len(set(ranks)) and set(ranks) <= left
        sizes.append(len(ranks))
    assert sizes[-1] == 1 or sizes == [plan.world_size]
    assert sizes[0] >= len(left) // plan.replica_size * plan.replica_size
