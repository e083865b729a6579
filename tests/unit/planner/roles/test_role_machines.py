"""Who teaches, samples and trains: the choice against all subsets tried one by one, its seconds against slow loops."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from tests.unit.planner.search.test_serving_search import spec_of
from tllm.core.errors import CapacityError, PlanError
from tllm.planner.cluster.device import Cluster, Device, LinkSpeed
from tllm.planner.cost.rank_work import TeacherFacts, TrainingFacts, rank_works
from tllm.planner.cost.serving_load import SamplingFacts
from tllm.planner.memory.role_memory import rollout_bytes, teacher_bytes
from tllm.planner.roles.role_machines import RoleChoice, RolesAsked, RoleWish, role_choices
from tllm.planner.roles.teacher_machines import Taught, teaching_seconds
from tllm.planner.search.training_layouts import TrainingConstraints
from tllm.planner.search.training_search import TrainingChoice, best_training
from tllm.planner.simulate.role_seconds import Learning, group_seconds, role_seconds, teacher_seconds
from tllm.spec.plan import Plan

STUDENT = spec_of(2)
FACTS = TrainingFacts(64, 8, 2)
TEACHER = TeacherFacts(spec_of(6), "float32", 8 * 64, 64)
TAUGHT = Taught(TEACHER, 64 * 64 * 6)


def cluster(*speeds: float, bandwidth: float = 1e8, memory: int = 2**32) -> Cluster:
    devices = tuple(
        Device(memory, (("float32", ((1.0, speed * 1e10), (256.0, speed * 1e10))),), speed * 1e10) for speed in speeds
    )
    count = len(speeds)
    names = tuple(f"n{i}" for i in range(count))
    return Cluster(names, devices, tuple(range(count)), (None,) * count, default=LinkSpeed(1e-4, bandwidth))


def refuse(plan: Plan, facts: TrainingFacts) -> None:
    """As `check_combination` does: a completion's ring passes each stage once."""
    if facts.sampling is not None and (plan.cp > 1 or plan.chunks > 1):
        raise PlanError(f"{plan} samples nothing")


def best(part: Cluster, facts: TrainingFacts) -> TrainingChoice:
    limits = TrainingConstraints((2,), 0, refuse)
    return best_training(STUDENT, part, facts, steps=100, constraints=limits).choices[0]


def taught_choices(machines: Cluster, taught: Taught, named: tuple[int, ...] | None = None) -> list[RoleChoice]:
    facts = replace(FACTS, teacher=taught.teacher)
    return role_choices(machines, RolesAsked(STUDENT, facts, {"teacher": RoleWish(named)}, taught), best)


def chosen(machines: Cluster, taught: Taught = TAUGHT) -> RoleChoice:
    return taught_choices(machines, taught)[0]


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 1.0, 6.0), (4.0, 1.0, 0.5)])
def test_no_other_choice_of_teachers_is_faster(speeds: tuple[float, ...]) -> None:
    machines, found = cluster(*speeds), list[float]()
    for count in range(3):
        for teachers in combinations((1, 2), count):
            one = taught_choices(machines, TAUGHT, teachers)[0]
            assert set(one.policy).isdisjoint(teachers) and one.policy[0] == 0
            found.append(one.seconds)
    assert chosen(machines).seconds == pytest.approx(min(found))


def test_the_fast_machine_teaches_where_the_teacher_is_the_larger() -> None:
    one = chosen(cluster(1.0, 1.0, 6.0))
    assert one.teachers == (2,), "three times as deep as the student"
    assert one.seconds == pytest.approx(max(one.training.predicted.seconds, one.teaching))
    beside = taught_choices(cluster(1.0), TAUGHT)[0]
    assert beside.teachers == () and beside.teaching == dict(beside.training.predicted.roles)["teacher"]
    assert one.seconds < beside.seconds / 2


def test_rows_go_to_whichever_teacher_is_free() -> None:
    machines = cluster(1.0, 1.0, 3.0, bandwidth=1e12)
    row = replace(TEACHER, tokens=TEACHER.row)
    slow, fast = (teacher_seconds(row, machines, device) for device in (1, 2))
    free = {1: 0.0, 2: 0.0}
    for _ in range(8):
        device = min(free, key=lambda one: free[one] + (slow if one == 1 else fast))
        free[device] += slow if device == 1 else fast
    assert teaching_seconds(machines, TAUGHT, (1, 2)) == pytest.approx(max(free.values()))
    assert teaching_seconds(machines, TAUGHT, (1,)) == pytest.approx(8 * slow)
    thin = cluster(1.0, 1.0, 3.0, bandwidth=1e3)
    assert teaching_seconds(thin, TAUGHT, (2,)) == pytest.approx(8 * TAUGHT.answer_bytes / 1e3), "the link is slower"


def test_what_the_student_writes_is_judged_after_it_is_there() -> None:
    machines = cluster(1.0, 2.0)
    (data,) = taught_choices(machines, TAUGHT, (1,))
    (own,) = taught_choices(machines, replace(TAUGHT, lmbda=1.0), (1,))
    (half,) = taught_choices(machines, replace(TAUGHT, lmbda=0.5), (1,))
    assert own.seconds == pytest.approx(own.training.predicted.policy + own.teaching)
    assert data.seconds == pytest.approx(max(own.training.predicted.policy, own.teaching))
    assert half.seconds == pytest.approx((own.seconds + data.seconds) / 2)


def test_a_machine_that_lacks_room_for_the_teacher_does_not_teach() -> None:
    machines = cluster(1.0, 1.0, 6.0)
    small = replace(machines.devices[2], memory=300 * 2**20 + teacher_bytes(TEACHER) // 2)
    tight = replace(machines, devices=(*machines.devices[:2], small))
    assert all(2 not in one.teachers for one in taught_choices(tight, TAUGHT))
    with pytest.raises(CapacityError, match="n2 is to teach: its model needs"):
        taught_choices(tight, TAUGHT, (2,))
    unknown = Taught(replace(TEACHER, dtype="bfloat16"), 1.0)
    assert [one.teachers for one in taught_choices(machines, unknown)] == [()], "its speed is known nowhere"
    with pytest.raises(CapacityError, match="no choice of machines for the roles has room"):
        taught_choices(cluster(1.0, 1.0, memory=2**20), TAUGHT)


SAMPLING = SamplingFacts(prompt=16, completion=48, groups=6, num_generations=4, at_once=8, context=64)
SAMPLED = replace(FACTS, sampling=SAMPLING)


def rollout_choices(machines: Cluster, wish: RoleWish, sampling: SamplingFacts = SAMPLING) -> list[RoleChoice]:
    return role_choices(machines, RolesAsked(STUDENT, replace(FACTS, sampling=sampling), {"rollout": wish}), best)


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (0.5, 1.0, 6.0), (4.0, 1.0, 0.5)])
def test_no_other_choice_of_rollout_servers_is_faster(speeds: tuple[float, ...]) -> None:
    machines, found = cluster(*speeds), dict[tuple[int, ...], float]()
    for count in range(3):
        for servers in combinations((1, 2), count):
            (one,) = rollout_choices(machines, RoleWish(servers))
            assert one.rollouts == servers and set(one.policy).isdisjoint(servers) and one.policy[0] == 0
            assert one.seconds == one.training.predicted.seconds
            found[servers] = one.seconds
    every = rollout_choices(machines, RoleWish())
    assert every[0].seconds == pytest.approx(min(found.values()))
    assert len(every) == (3 if speeds[1] == speeds[2] else 4), "sets that are alike are tried once"
    just_one = rollout_choices(machines, RoleWish(count=1))
    assert {one.rollouts for one in just_one} <= {(1,), (2,)}
    assert just_one[0].seconds == pytest.approx(min(found[(1,)], found[(2,)]))


def test_servers_take_the_weights_over_one_port_and_then_what_is_free_takes_the_next_prompts() -> None:
    machines = cluster(1.0, 1.0, 3.0, bandwidth=1e7)
    facts = replace(SAMPLED, sampling=replace(SAMPLING, servers=(1, 2), share=0.5))
    free = {1: 0.0, 2: 0.0}
    for _ in range(3):  # six prompts: as many at once as a server computes, which are two
        device = min(free, key=lambda one: (free[one], one))
        free[device] += group_seconds(STUDENT, SAMPLED, machines, device, 2)
    numbers = sum(
        one.elements for unit in rank_works(STUDENT, Plan.parse("pp=1", 2), FACTS)[0].learned(STUDENT) for one in unit
    )
    way = 2 * numbers * 4 / 1e7
    found = role_seconds(STUDENT, Plan.parse("pp=1", 2), facts, machines, (0,), Learning(1.0, 1.0))
    assert found == {"sampling": pytest.approx(0.5 * (way + max(free.values())))}
    apart = cluster(1.0, 1.0, 3.0, 1.0, bandwidth=1e7)
    two = role_seconds(STUDENT, Plan.parse("pp=2", 2), facts, apart, (0, 3), Learning(1.0, 1.0))
    assert two["sampling"] - found["sampling"] == pytest.approx(0.5 * numbers * 4 / 2 / 1e7), (
        "half of them lie elsewhere"
    )
    ahead = replace(SAMPLED, sampling=replace(SAMPLING, servers=(1, 2), share=0.5, ahead=1))
    for part in (0.25, 4.0):
        learning = part * found["sampling"]
        waits = role_seconds(STUDENT, Plan.parse("pp=1", 2), ahead, machines, (0,), Learning(learning, 1.0))["sampling"]
        assert waits == pytest.approx(max(0.0, found["sampling"] - learning)), "a step takes as long as the slower one"
    gathers = role_seconds(STUDENT, Plan.parse("pp=2", 2), ahead, apart, (0, 3), Learning(1e9, 1.0))["sampling"]
    assert gathers == pytest.approx(0.5 * numbers * 4 / 2 / 1e7), "nobody learns meanwhile"


def test_a_machine_without_room_for_the_cache_does_not_sample() -> None:
    machines = cluster(1.0, 1.0, 6.0)
    small = replace(machines.devices[2], memory=300 * 2**20 + rollout_bytes(STUDENT, SAMPLED) // 2)
    tight = replace(machines, devices=(*machines.devices[:2], small))
    assert all(2 not in one.rollouts for one in rollout_choices(tight, RoleWish()))
    with pytest.raises(CapacityError, match="n2 is to sample: its model needs"):
        rollout_choices(tight, RoleWish((2,)))
    best_of = rollout_choices(machines, RoleWish())
    assert all(not one.training.memory[0].cache for one in best_of if one.rollouts), "the ranks keep no cache"
