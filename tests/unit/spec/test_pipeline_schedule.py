"""Schedules as lists: each order says what its paper says, can be played to its end, and faults are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.properties import examples
from tests.support.training.schedule_check import check
from tllm.core.errors import PlanError
from tllm.spec.pipeline_schedule import DEEP, ORDERS, Op, Schedule, StageChunk, StageTransfer, build, play


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(ORDERS)))
    stages, microbatches = draw(st.integers(1, 9)), draw(st.integers(1, 24))
    chunks = draw(st.integers(2, 5)) if name == "interleaved" else 1
    learns_from = draw(st.integers(0, stages * chunks - 1))
    if name not in DEEP:
        return build(name, stages, microbatches, chunks=chunks, learns_from=learns_from)
    per_hop = st.lists(st.integers(0, 4), min_size=stages - 1, max_size=stages - 1).map(tuple)
    return build(name, stages, microbatches, draw(st.integers(0, 5) | per_hop), learns_from=learns_from)


def written(schedule: Schedule, stage: int) -> str:
    return " ".join(map(str, schedule.lists[stage]))


@settings(max_examples=examples(300))
@given(schedules())
def test_every_order_can_be_played(schedule: Schedule) -> None:
    check(schedule)
    played = list(play(schedule))
    for stage in range(schedule.stages):
        assert tuple(op for at, op in played if at == stage) == schedule.lists[stage]


@given(schedules())
def test_both_ends_of_a_hop_derive_the_same(schedule: Schedule) -> None:
    ops = [(stage, op) for stage, row in enumerate(schedule.lists) for op in row]
    sent = [hop for stage, op in ops if (hop := schedule.sends(stage, op))]
    received = [hop for stage, op in ops if (hop := schedule.receives(stage, op))]
    assert sorted(sent) == sorted(received)
    places = schedule.places()
    hops = len(places) - 1 + len(places) - 1 - schedule.learns_from  # gradients go to no run that learns nothing
    assert len(set(sent)) == len(sent) == hops * schedule.microbatches
    for hop in sent:
        step = 1 if hop.kind == "forward" else -1
        assert places.index(hop.target) == places.index(hop.source) + step


@given(schedules())
def test_gradients_are_summed_in_one_order_under_every_schedule(schedule: Schedule) -> None:
    for row in schedule.lists:
        for chunk in range(schedule.chunks):
            sums = [op.microbatch for op in row if op.chunk == chunk and op.kind in ("backward", "backward_weight")]
            assert sums == list(range(schedule.microbatches))


def test_1f1b_as_in_the_paper() -> None:
    schedule = build("1f1b", 4, 6)
    assert written(schedule, 0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"
    assert written(schedule, 2) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5"
    assert written(schedule, 3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"


def test_interleaved_as_in_the_paper() -> None:
    schedule = build("interleaved", 2, 4, chunks=2)
    assert written(schedule, 0) == "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3"
    assert written(schedule, 1) == "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3"


def test_zero_bubble_as_in_the_paper() -> None:
    schedule = build("zero_bubble", 3, 4)
    assert written(schedule, 0) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert written(schedule, 2) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"


@given(st.integers(1, 9), st.integers(1, 24), st.integers(0, 4), st.integers(2, 4))
def test_live_activations_equal_theory(stages: int, microbatches: int, depth: int, chunks: int) -> None:
    p, m, v = stages, microbatches, chunks
    group = -(-m // max(1, m // p))
    for s in range(p):
        assert build("gpipe", p, m).peak_live(s) == m
        assert build("1f1b", p, m).peak_live(s) == min(m, p - s)
        assert build("1f1b", p, m, depth=depth).peak_live(s) == min(m, 1 + depth * (p - 1 - s))
        assert build("zero_bubble", p, m).peak_live(s) == min(m, p)
        assert build("zero_bubble", p, m, depth=depth).peak_live(s) == min(m, 1 + depth * (p - 1))
        interleaved = min(m * v, 1 + 2 * (p - 1 - s) + (v - 1) * group)
        assert build("interleaved", p, m, chunks=v).peak_live(s) == interleaved


def test_a_depth_for_each_hop_warms_up_only_before_the_slow_one() -> None:
    schedule = build("1f1b", 4, 32, depth=(1, 3, 1))
    assert [schedule.peak_live(stage) for stage in range(4)] == [6, 5, 2, 1]


def test_what_an_op_receives_and_sends() -> None:
    schedule = build("interleaved", 2, 4, chunks=2)
    assert schedule.receives(0, Op("forward", 1)) is None
    assert schedule.sends(0, Op("forward", 1)) == StageTransfer("forward", 1, StageChunk(0, 0), StageChunk(1, 0))
    assert schedule.sends(1, Op("forward", 1)) == StageTransfer("forward", 1, StageChunk(1, 0), StageChunk(0, 1))
    assert schedule.sends(1, Op("forward", 1, 1)) is None and schedule.receives(1, Op("backward", 1, 1)) is None
    assert schedule.sends(0, Op("backward", 1, 1)) == StageTransfer("backward", 1, StageChunk(0, 1), StageChunk(1, 0))
    assert schedule.sends(0, Op("backward", 1)) is None
    halves = build("zero_bubble", 2, 4)
    assert halves.sends(1, Op("backward_input", 2)) == StageTransfer("backward", 2, StageChunk(1, 0), StageChunk(0, 0))
    assert halves.sends(1, Op("backward_weight", 2)) is None and halves.receives(0, Op("backward_weight", 2)) is None


def with_list(schedule: Schedule, stage: int, ops: list[Op]) -> Schedule:
    lists = list(schedule.lists)
    lists[stage] = tuple(ops)
    return replace(schedule, lists=tuple(lists))


def test_a_lost_or_doubled_op_is_named() -> None:
    schedule = build("1f1b", 2, 3)
    ops = list(schedule.lists[1])
    with pytest.raises(PlanError, match="stage 1 does forward for microbatch 2 on chunk 0"):
        check(with_list(schedule, 1, ops[:-1]))
    with pytest.raises(PlanError, match="stage 1 does forward, backward, backward for microbatch 2"):
        check(with_list(schedule, 1, [*ops, ops[-1]]))
    with pytest.raises(PlanError, match="stage 1 does backward, forward for microbatch 0"):
        check(with_list(schedule, 1, [ops[1], ops[0], *ops[2:]]))
    with pytest.raises(PlanError, match="microbatch 3 and chunk 0 in a schedule of 3 microbatches"):
        check(with_list(schedule, 1, [*ops, Op("forward", 3)]))
    with pytest.raises(PlanError, match="1 lists for 2 stages"):
        check(replace(schedule, lists=schedule.lists[:1]))


def test_weight_gradients_before_input_gradients_are_refused() -> None:
    schedule = build("zero_bubble", 1, 1)
    with pytest.raises(PlanError, match="forward, backward_weight, backward_input"):
        check(with_list(schedule, 0, [Op("forward", 0), Op("backward_weight", 0), Op("backward_input", 0)]))


def test_a_deadlock_names_who_waits_for_whom() -> None:
    eager = build("1f1b", 2, 4, depth=0)
    late = build("gpipe", 2, 4)
    mixed = replace(eager, lists=(eager.lists[0], late.lists[1]))
    with pytest.raises(
        PlanError, match=r"2 of 2 stages waiting: stage 0 at B0 \(op 1\) for stage 1, which stands at op 1 of"
    ):
        check(mixed)


def test_an_order_that_a_link_cannot_keep_is_refused() -> None:
    schedule = build("gpipe", 2, 2)
    f0, f1, b0, b1 = schedule.lists[1]
    with pytest.raises(PlanError, match=r"forward tensor 0 from stage 0 to 1 is sent for microbatch 0 .* for 1"):
        check(with_list(schedule, 1, [f1, f0, b0, b1]))


@settings(max_examples=examples(300))
@given(schedules(), st.data())
def test_what_check_accepts_after_a_swap_still_plays(schedule: Schedule, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, schedule.stages - 1))
    ops = list(schedule.lists[stage])
    a, b = data.draw(st.integers(0, len(ops) - 1)), data.draw(st.integers(0, len(ops) - 1))
    ops[a], ops[b] = ops[b], ops[a]
    swapped = with_list(schedule, stage, ops)
    try:
        check(swapped)
    except PlanError:
        return
    assert len(list(play(swapped))) == sum(map(len, schedule.lists))


@pytest.mark.parametrize(
    ("name", "options", "fault"),
    [
        ("1f1", {}, "'1f1' is not known\nhint: did you mean '1f1b'"),
        ("gpipe", {"stages": 0}, "0 stages"),
        ("gpipe", {"microbatches": 0}, "0 microbatches"),
        ("gpipe", {"depth": 2}, "gpipe has no warm-up depth, and 2 is given"),
        ("1f1b", {"depth": -1}, "depth -1 is below 0"),
        ("1f1b", {"depth": (1, 2)}, "2 warm-up depths for the 1 hop between 2 stages"),
        ("1f1b", {"chunks": 2}, "1f1b with 2 chunks"),
        ("interleaved", {}, "interleaved with 1 chunk"),
    ],
)
def test_numbers_that_an_order_cannot_take_are_refused(name: str, options: dict[str, object], fault: str) -> None:
    numbers: dict[str, object] = {"stages": 2, "microbatches": 2, **options}
    with pytest.raises(PlanError, match=fault):
        build(name, **numbers)  # type: ignore[arg-type]
