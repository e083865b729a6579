"""Who teaches and who trains: the choice against all subsets tried one by one, and its seconds against a slow loop."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from tests.unit.planner.search.test_serving_search import spec_of
from tllm.core.errors import CapacityError
from tllm.planner.cluster.device import Cluster, Device, LinkSpeed
from tllm.planner.cost.rank_work import TeacherFacts, TrainingFacts
from tllm.planner.memory.role_memory import teacher_bytes
from tllm.planner.roles.teacher_machines import Taught, TaughtChoice, taught_choices, teaching_seconds
from tllm.planner.search.training_layouts import TrainingConstraints
from tllm.planner.search.training_search import TrainingChoice, best_training
from tllm.planner.simulate.role_seconds import teacher_seconds

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


def best(part: Cluster, is_beside: bool) -> TrainingChoice:
    facts = replace(FACTS, teacher=TEACHER if is_beside else None)
    limits = TrainingConstraints((2,), 0)
    return best_training(STUDENT, part, facts, steps=100, constraints=limits).choices[0]


def chosen(machines: Cluster, taught: Taught = TAUGHT) -> TaughtChoice:
    return taught_choices(machines, taught, best)[0]


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 1.0, 6.0), (4.0, 1.0, 0.5)])
def test_no_other_choice_of_teachers_is_faster(speeds: tuple[float, ...]) -> None:
    machines, found = cluster(*speeds), list[float]()
    for count in range(3):
        for teachers in combinations((1, 2), count):
            one = taught_choices(machines, TAUGHT, best, teachers)[0]
            assert set(one.policy).isdisjoint(teachers) and one.policy[0] == 0
            found.append(one.seconds)
    assert chosen(machines).seconds == pytest.approx(min(found))


def test_the_fast_machine_teaches_where_the_teacher_is_the_larger() -> None:
    one = chosen(cluster(1.0, 1.0, 6.0))
    assert one.teachers == (2,), "three times as deep as the student"
    assert one.seconds == pytest.approx(max(one.student.predicted.seconds, one.teaching))
    beside = taught_choices(cluster(1.0), TAUGHT, best)[0]
    assert beside.teachers == () and beside.teaching == dict(beside.student.predicted.roles)["teacher"]
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
    (data,) = taught_choices(machines, TAUGHT, best, (1,))
    (own,) = taught_choices(machines, replace(TAUGHT, lmbda=1.0), best, (1,))
    (half,) = taught_choices(machines, replace(TAUGHT, lmbda=0.5), best, (1,))
    assert own.seconds == pytest.approx(own.student.predicted.policy + own.teaching)
    assert data.seconds == pytest.approx(max(own.student.predicted.policy, own.teaching))
    assert half.seconds == pytest.approx((own.seconds + data.seconds) / 2)


def test_a_machine_that_lacks_room_for_the_teacher_does_not_teach() -> None:
    machines = cluster(1.0, 1.0, 6.0)
    small = replace(machines.devices[2], memory=300 * 2**20 + teacher_bytes(TEACHER) // 2)
    tight = replace(machines, devices=(*machines.devices[:2], small))
    assert all(2 not in one.teachers for one in taught_choices(tight, TAUGHT, best))
    with pytest.raises(CapacityError, match="n2 is to teach: the teacher needs"):
        taught_choices(tight, TAUGHT, best, (2,))
    unknown = Taught(replace(TEACHER, dtype="bfloat16"), 1.0)
    assert [one.teachers for one in taught_choices(machines, unknown, best)] == [()], "its speed is known nowhere"
    with pytest.raises(CapacityError, match="no choice of teachers has room"):
        taught_choices(cluster(1.0, 1.0, memory=2**20), TAUGHT, best)
