"""By which plan machines answer runs together: against every choice of machines, order and plan, tried one by one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import combinations, permutations

import pytest

from tests.unit.planner.roles.test_role_machines import cluster
from tests.unit.planner.search.test_serving_search import spec_of
from tllm.core.errors import CapacityError, PlanError
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.serving_load import SamplingFacts
from tllm.planner.memory.heap import TRAINER_BYTES
from tllm.planner.roles.answering_plans import AnsweringLoad, GroupLoad, RowLoad, answering_choices
from tllm.spec.plan import Plan

SPEC = spec_of(6)
ROW = RowLoad.of(SPEC, "float32", 64)
GROUPS = GroupLoad.of(SPEC, "float32", SamplingFacts(16, 48, 2, 4, 8, 64))
EVEN = {1: ("pp=1",), 2: ("pp=2", "tp=2"), 3: ("pp=3", "tp=3")}


def of_memory(machines: Cluster, *parts: float, load: AnsweringLoad = ROW) -> Cluster:
    """The same with room for so much of the model on each."""
    whole = load.room(machines, None).parts[0]
    rooms = [TRAINER_BYTES + int(part * whole) for part in parts]
    devices = [replace(one, memory=room) for one, room in zip(machines.devices, rooms, strict=True)]
    return replace(machines, devices=tuple(devices))


@pytest.mark.parametrize("load", [ROW, GROUPS])
@pytest.mark.parametrize("bandwidth", [1e6, 1e10])
@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 3.0, 0.5), (4.0, 1.0, 1.0)])
def test_no_even_plan_on_any_choice_of_machines_is_faster(
    speeds: tuple[float, ...], bandwidth: float, load: AnsweringLoad
) -> None:
    machines, found = cluster(*speeds, bandwidth=bandwidth), dict[tuple[Plan, tuple[int, ...]], float]()
    for count in range(3):
        for others in (order for some in combinations((1, 2), count) for order in permutations(some)):
            for text in EVEN[1 + count]:
                plan, devices = Plan.parse(text, 6), (0, *others)
                with suppress(PlanError):
                    found[plan, devices] = load.seconds(machines, plan, devices)
    every = answering_choices(machines, load)
    assert every[0].seconds <= min(found.values()) * (1 + 1e-12)
    assert [one.seconds for one in every] == sorted(one.seconds for one in every)
    assert all(one.devices[0] == 0 for one in every), "runs reach the first machine"
    assert all(one.seconds == load.seconds(machines, one.plan, one.devices) for one in every)


def test_one_machine_answers_where_the_links_are_slow_and_several_where_they_are_fast() -> None:
    slow, fast = (answering_choices(cluster(1.0, 1.0, bandwidth=rate), ROW)[0] for rate in (1e6, 1e11))
    assert (str(slow.plan), slow.devices) == (str(Plan.parse("pp=1", 6)), (0,))
    assert fast.plan == Plan.parse("tp=2", 6) and fast.seconds < 0.6 * slow.seconds


def test_where_none_has_room_for_all_of_it_the_model_is_divided_as_there_is_room() -> None:
    machines = of_memory(cluster(1.0, 1.0, bandwidth=1e6), 0.4, 0.9)
    every = answering_choices(machines, ROW)
    assert all(len(one.devices) == 2 for one in every), "neither has room alone"
    for one in every:
        parts = ROW.room(machines, one.plan).parts
        assert parts[0] < parts[1] and one.held == max(parts) + TRAINER_BYTES
    with pytest.raises(
        CapacityError, match=r"no plan has room: the model needs .* to teach, and the machines have n0 "
    ):
        answering_choices(of_memory(machines, 0.3, 0.3), ROW)
    with pytest.raises(CapacityError, match="to sample"):
        answering_choices(of_memory(machines, 0.2, 0.2, load=GROUPS), GROUPS)


def test_rows_that_pass_stage_after_stage_leave_all_that_has_room_to_the_fastest() -> None:
    """Of six layers five, where balanced stages are four and two and even ones three and three."""
    machines = of_memory(cluster(1.0, 2.0, bandwidth=1e6), 0.4, 0.95)
    by_layers = {
        tuple(stage.stop - stage.start for stage in one.plan.stages): one.seconds
        for one in answering_choices(machines, ROW)
        if one.plan.pp == 2
    }
    assert min(by_layers, key=by_layers.__getitem__) == (1, 5) and (2, 4) in by_layers, "each seen by its search"
    alone = of_memory(cluster(1.0, 2.0, bandwidth=1e6), 0.6, 0.95)
    assert answering_choices(alone, ROW)[0].devices == (0, 1), "the first lacks room for all of it"


def test_unlike_machines_share_layers_by_their_speeds() -> None:
    machines = cluster(1.0, 3.0, bandwidth=1e11)
    best = answering_choices(machines, ROW)[0]
    assert best.plan.stages[0].shares == (5, 16), "in about the proportion of their speeds"
    assert best.seconds < 0.7 * ROW.seconds(machines, Plan.parse("tp=2", 6), (0, 1))


def test_of_many_machines_the_fastest_and_the_largest_are_tried() -> None:
    machines = cluster(1.0, *(1.0 + number / 10 for number in range(9)), bandwidth=1e11)
    large = replace(machines.devices[2], memory=2 * machines.devices[2].memory)
    machines = replace(machines, devices=(*machines.devices[:2], large, *machines.devices[3:]))
    sets = {frozenset(one.devices) for one in answering_choices(machines, ROW)}
    assert {frozenset((0,)), frozenset((0, 9)), frozenset((0, 2)), frozenset((0, 8, 9)), frozenset((0, 2, 9))} <= sets


def test_a_machine_of_unknown_speed_holds_nothing() -> None:
    machines, known = cluster(1.0, 1.0), RowLoad.of(SPEC, "bfloat16", 64)
    rates = (*machines.devices[0].flop_rates, ("bfloat16", machines.devices[0].flop_rates[0][1]))
    one = replace(machines, devices=(replace(machines.devices[0], flop_rates=rates), machines.devices[1]))
    assert {each.devices for each in answering_choices(one, known)} == {(0,)}
    with pytest.raises(CapacityError):
        answering_choices(machines, known)
