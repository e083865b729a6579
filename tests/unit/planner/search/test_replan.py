from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm.core.errors import PlanError
from tllm.planner.search.replan import replan
from tllm.spec.plan import Plan, Stage


@pytest.mark.parametrize(
    ("text", "layers", "ranks", "expected"),
    [
        ("pp=3", 12, {0, 2}, "pp=2,tp=1+1,layers=6+6"),
        ("pp=3", 12, {1}, "pp=1,tp=1,layers=12"),
        ("pp=2,tp=2", 8, {0, 2, 3}, "pp=2,tp=1+2,layers=3+5"),
        ("pp=2,tp=2,layers=6+2", 8, {0, 1, 3}, "pp=2,tp=2+1,layers=7+1"),
        ("tp=3,shares=1:2:1", 4, {0, 1}, "pp=1,tp=2,layers=4,shares=1:2"),
        ("pp=2,tp=1+2,shares=1+3:1", 8, {0, 2}, "pp=2,tp=1+1,layers=6+2"),
        ("pp=2,tp=2,experts=spread", 4, {2, 3}, "pp=1,tp=2,layers=4,experts=spread"),
        ("tp=4,tensor=2d", 8, {0, 1, 3}, "pp=1,tp=3,layers=8"),
        ("pp=2,tp=1+4,tensor=2d", 8, {1, 2, 3, 4}, "pp=1,tp=4,layers=8,tensor=2d"),
        ("pp=2,tp=1+4,tensor=2d", 8, {0}, "pp=1,tp=1,layers=8"),
        ("pp=2,tp=1+2", 6, {0, 1, 2}, "pp=2,tp=1+2,layers=3+3"),
    ],
)
def test_ranks_keep_their_part_to_one_another(text: str, layers: int, ranks: set[int], expected: str) -> None:
    """A rank that alone held all layers of a stage stands for them; one of two equal ones for half of them."""
    assert str(replan(Plan.parse(text, layers), ranks)) == expected


def test_nobody_left_is_said() -> None:
    with pytest.raises(PlanError, match="no rank is left"):
        replan(Plan.parse("pp=2", 4), ())


stage_shares = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@given(st.lists(st.tuples(st.integers(1, 12), stage_shares), min_size=1, max_size=5), st.data())
def test_what_is_left_is_a_plan_for_the_same_layers(
    stages: list[tuple[int, tuple[int, ...]]], data: st.DataObject
) -> None:
    bounds = [sum(layers for layers, _ in stages[:i]) for i in range(len(stages) + 1)]
    plan = Plan(tuple(Stage(bounds[i], bounds[i + 1], shares) for i, (_, shares) in enumerate(stages)))
    ranks = data.draw(st.sets(st.integers(0, plan.world_size - 1), min_size=1))
    left = replan(plan, ranks)
    left.check(bounds[-1])
    assert left.world_size == len(ranks)
    kept = [plan.stages[plan.place(rank)[0]].shares[plan.place(rank)[1]] for rank in sorted(ranks)]
    assert [share for stage in left.stages for share in stage.shares] == kept
    assert left.pp == len({plan.place(rank)[0] for rank in ranks})
    if len(ranks) == plan.world_size:
        assert left == plan
