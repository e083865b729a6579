"""The plan's short form, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm.core.errors import PlanError
from tllm.spec.plan import Plan, Stage


def test_short_form_gives_each_stage_its_layers_and_ranks() -> None:
    plan = Plan.parse("pp=2,tp=1+2,layers=10+22,shares=1:3", 32)
    assert plan.stages == (Stage(0, 10, (1,)), Stage(10, 32, (1, 3)))
    assert plan.world_size == 3
    assert [plan.place(rank) for rank in range(3)] == [(0, 0), (1, 0), (1, 1)]
    assert list(plan.ranks(1)) == [1, 2]


def test_what_is_left_out_is_even() -> None:
    assert Plan.parse("pp=3", 8).stages == (Stage(0, 2), Stage(2, 5), Stage(5, 8))
    assert Plan.parse("tp=2", 4).stages == (Stage(0, 4, (1, 1)),)
    assert Plan.parse("layers=3+1", 4).pp == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pp=2,layers=2*0", "layers"),
        ("pp=2,layers=2*x", "layers"),
        ("pp=2,layers=3+3", "holds 6 layers and the model has 4"),
        ("pp=5", "holds no layer"),
        ("pp=2,tp=1+2+3", "2 stages and of 3"),
        ("tp=2,shares=1:2:3", "no stage has so many"),
        ("pq=2", "'pq=2' is not understood"),
        ("tp=2,pp", "'pp' has no value"),
        ("pp=0", "not a whole number"),
        ("pp=2,pp=3", "twice"),
        ("experts=half", "experts=half is not known"),
        ("tp=²", "not a whole number"),
        ("dp=0", "not a whole number"),
        ("zero=4", "zero=4 is not known"),
        ("schedule=gpip", "one of gpipe, 1f1b"),
        ("sequence=yes", "sequence=yes is not known"),
        ("pp=2,chunks=2,layers=1+1+2", "layers of 3 runs and chunks=2"),
        ("tp=4,tensor=4d", "tensor=4d is not known"),
        ("tensor=2d", "tensor=2d needs tp to be a square, and tp is 1"),
        ("tp=6,tensor=2d", "needs tp to be a square, and tp is 6"),
        ("tp=9,tensor=3d", "needs tp to be a cube, and tp is 9"),
        ("tp=9,tensor=2.5d", "needs tp to be a square times a depth of 2 or more, and tp is 9"),
        ("tp=4,tensor=2d,shares=1:1:1:2", "shares=1:1:1:2: blocks of a grid are even"),
        ("pp=2,tp=4+2,tensor=2d", "needs tp to be a square, and tp is 2"),
        ("pp=2,tensor=2d", "needs tp to be a square, and tp is 1"),
        ("tp=4,tensor=2d,cp=2", "cp=2: a grid divides the tokens itself"),
        ("tp=4,tensor=2d,sequence=true", "sequence=true: a grid divides the tokens itself"),
        ("tp=4,tensor=2d,experts=spread", "experts=spread: experts are not cut both ways"),
        ("tp=4,tensor=2d,zero=3", "zero=3: a grid's weights are not gathered"),
        ("tp=4,tensor=2d,servers=1", "servers=1: with servers each replica is one rank"),
        ("tp=1*1000000000", "tp is 1000000000, and a plan has 1,048,576 at most"),
        ("tp=1000000000", "tp is 1000000000, and a plan has 1,048,576 at most"),
        ("tp=" + "+".join(["1*1000000"] * 9), "the plan has 2,000,000 values of tp, and at most 1,048,576"),
        ("pp=4,tp=1000000", "the plan has 4,000,000 ranks, and at most 1,048,576"),
        ("pp=1000000,chunks=1000000", "1,000,000,000,000 stages times chunks"),
        ("dp=1000000,cp=1000000", "the plan has 1,000,000,000,000 ranks, and at most 1,048,576"),
        ("dp=" + "9" * 5000, "dp is a number of 5000 digits, and a plan has"),
        ("tp=2,shares=1:" + "9" * 5000, "shares is a number of 5000 digits, and a plan has"),
        ("layers=" + "x" * 5000, "layers='x{40}' is not a whole number"),
    ],
)
def test_a_bad_plan_is_refused_in_words(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says.replace("(", r"\(")):
        Plan.parse(text, 4)


def test_numbers_may_have_noughts_before_them_and_shares_may_be_bytes() -> None:
    plan = Plan.parse(f"pp={'0' * 5000}2,tp=2,shares=16000000000:8000000000", 4)
    assert (plan.pp, plan.stages[0].shares) == (2, (16_000_000_000, 8_000_000_000))


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ((Stage(0, 2), Stage(3, 4)), "nowhere"),
        ((Stage(0, 2), Stage(1, 4)), "twice"),
        ((Stage(0, 3),), "holds 3 layers and the model has 4"),
        ((), "no stage"),
        ((Stage(0, 4, ()),), "shares"),
    ],
)
def test_layers_are_held_exactly_once(stages: tuple[Stage, ...], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan(stages).check(4)


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,pp=2,tp=2,zero=1",
        "dp=3:1,cp=2,sequence=true",
        "pp=2,chunks=2,layers=1+1+1+1",
        "pp=3,layers=1+1+2,schedule=zero_bubble,depth=2+0",
        "dp=4,ep=2,experts=spread,recompute=layer,offload=disk,depth=0",
        "dp=2,servers=3",
        "dp=2,tp=8,tensor=2.5d,zero=2",
    ],
)
def test_what_training_adds_is_read_back(text: str) -> None:
    plan = Plan.parse(text, 4)
    assert Plan.parse(str(plan), 4) == plan
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    with pytest.raises(PlanError, match="is for training"):
        plan.check_serving()


def test_ranks_are_numbered_replica_stage_cp_tp() -> None:
    plan = Plan.parse("dp=2,pp=2,cp=2,tp=1+3,servers=1", 4)
    assert plan.replica_size == 8 and plan.world_size == 17
    places = [plan.coordinates(rank) for rank in range(16)]
    assert places == sorted(places)
    assert [plan.rank_of(place) for place in places] == list(range(16))
    assert plan.coordinates(13) == (1, 1, 1, 0)
    with pytest.raises(PlanError, match="rank 16"):
        plan.coordinates(16)


def test_chunks_go_round_the_stages() -> None:
    plan = Plan.parse("pp=2,tp=1+2,chunks=2", 8)
    assert plan.pp == 2 and plan.schedule == "interleaved" and plan.replica_size == 3
    assert [len(run) for run in plan.runs] == [2, 2, 2, 2]
    assert [stage.tp for stage in plan.stages] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan((Stage(0, 4),), dp=(3,)), "a single one 1"),
        (Plan((Stage(0, 2), Stage(2, 3), Stage(3, 4)), chunks=2), "3 runs of layers"),
        (Plan((Stage(0, 2), Stage(2, 4, (1, 1))), chunks=2), "run 1 has shares"),
        (Plan((Stage(0, 4),), cp=0), "cp=0"),
        (Plan((Stage(0, 4),), cp=1 << 60), "the plan has 1,152,921,504,606,846,976 ranks"),
    ],
)
def test_counts_that_are_none_are_refused(plan: Plan, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        plan.check(4)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    at, stages = 0, []
    for _ in range(draw(st.integers(1, 4))):
        stop = at + draw(st.integers(1, 5))
        stages.append(Stage(at, stop, tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))))
        at = stop
    return Plan(tuple(stages), draw(st.sampled_from(["cut", "spread"])))


@given(plans())
def test_the_short_form_says_it_all(plan: Plan) -> None:
    back = Plan.parse(str(plan), plan.stages[-1].stop)
    uneven = any(len(set(stage.shares)) > 1 for stage in plan.stages)
    same_places = [(s.start, s.stop, s.tp) for s in back.stages] == [(s.start, s.stop, s.tp) for s in plan.stages]
    assert same_places and back.experts == plan.experts
    if uneven:
        assert [s.shares for s in back.stages] == [s.shares for s in plan.stages]


@given(plans())
def test_json_round_trip(plan: Plan) -> None:
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_a_plan_file_that_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"stages": [{"start": "zero"}]}')
    with pytest.raises(Exception, match="is not a plan"):
        Plan.parse(str(tmp_path / "p.json"), 4)
