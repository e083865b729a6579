"""Which machines teach and which train the student: every choice, with the seconds of a step of both together.

A teacher is computed whole by each machine that teaches (`tllm teach`); whichever is free takes the next row. Their
rows are computed while the student learns from those of the step before, so that the slower of both counts; rows that
the student writes itself (`lmbda`) can only be judged when they are there, so that both count one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

from tllm.core.errors import CapacityError, PlanError
from tllm.planner.cluster.alike import counts_upto, kinds_of
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TeacherFacts
from tllm.planner.memory.heap import TRAINER_BYTES
from tllm.planner.memory.role_memory import teacher_bytes
from tllm.planner.search.training_search import TrainingChoice
from tllm.planner.simulate.role_seconds import teacher_seconds

MOST_DEVICES = 8
"""Devices of which every choice of teachers is tried; of more those that teach fastest, and those that do slowest."""

Devices = tuple[int, ...]

BestStudent = Callable[[Cluster, bool], TrainingChoice]
"""best(cluster, is_beside): the student's best plan on these devices, with the teacher in rank 0's process or without.

CapacityError or PlanError where there is none.
"""


@dataclass(frozen=True)
class TaughtChoice:
    """Who teaches, who trains, and what a step takes. Numbers of devices are those of the whole cluster."""

    teachers: Devices
    """Where there is none, the teacher is beside the student, on the device of rank 0."""
    policy: Devices
    """The device of each rank of the student's plan."""
    student: TrainingChoice
    teaching: float
    """Seconds in which the teachers judge the rows of a step."""
    seconds: float
    """Of a step, of both together."""


@dataclass(frozen=True)
class Taught:
    """What is asked: a teacher, the bytes of what it says of one row, and the share of steps that the student writes
    itself."""

    teacher: TeacherFacts
    answer_bytes: float
    lmbda: float = 0.0


def taught_choices(
    cluster: Cluster, taught: Taught, best: BestStudent, named: Devices | None = None
) -> list[TaughtChoice]:
    """The best plan for each choice of teachers, the fastest first; those that are `named` alone, where some are.

    Device 0, which has the data, trains. CapacityError where no choice has room.
    """
    for device in named or ():
        if not can_teach(cluster, taught.teacher, device):
            needs = (teacher_bytes(taught.teacher) + TRAINER_BYTES) / 2**30
            raise CapacityError(
                f"{cluster.name(device)} is to teach: the teacher needs {needs:.2f} GiB and it has "
                f"{cluster.devices[device].memory / 2**30:.2f} GiB, or its speed in {taught.teacher.dtype} is unknown",
                "name another machine, or none",
            )
    able = [device for device in range(1, len(cluster)) if can_teach(cluster, taught.teacher, device)]
    if named is not None:
        choices: list[Devices] = [named]
    else:
        choices = [(), *_choices(cluster, taught.teacher, able)]
    found, why = list[TaughtChoice](), ""
    for teachers in choices:
        try:
            found.append(_choice(cluster, taught, best, teachers))
        except (CapacityError, PlanError) as error:
            why = error.message
    if not found:
        raise CapacityError(f"no choice of teachers has room: {why}", "give more or larger machines")
    return sorted(found, key=lambda choice: choice.seconds)


def can_teach(cluster: Cluster, teacher: TeacherFacts, device: int) -> bool:
    """Whether a device has room for the whole teacher, and its speed in the teacher's dtype is known."""
    own = cluster.as_serving().devices[device]
    return own.knows(teacher.dtype) and teacher_bytes(teacher) + TRAINER_BYTES <= cluster.devices[device].memory


def teaching_seconds(cluster: Cluster, taught: Taught, teachers: Sequence[int], student: int = 0) -> float:
    """Until all rows of a step are judged, each by the teacher that is first free; answers travel meanwhile."""
    teacher, serving = taught.teacher, cluster.as_serving()
    rows = -(-teacher.tokens // teacher.row)
    one = replace(teacher, tokens=teacher.row)
    each = [
        max(
            teacher_seconds(one, serving, device),
            taught.answer_bytes / cluster.link(device, student).rate(taught.answer_bytes),
        )
        for device in teachers
    ]
    ends = [(seconds, seconds) for seconds in each]
    heapify(ends)
    last = 0.0
    for _ in range(rows):
        end, seconds = ends[0]
        last = max(last, end)
        heapreplace(ends, (end + seconds, seconds))
    return last


def _choices(cluster: Cluster, teacher: TeacherFacts, able: Sequence[int]) -> Iterator[Devices]:
    """Sets of devices that may teach; of devices that are alike the last ones, as the first are nearer to the data."""
    if not able:
        return
    if len(able) > MOST_DEVICES:
        serving = cluster.as_serving()
        by_speed = sorted(able, key=lambda device: teacher_seconds(teacher, serving, device))
        for count in range(1, len(able) + 1):
            yield from dict.fromkeys((tuple(sorted(by_speed[:count])), tuple(sorted(by_speed[-count:]))))
        return
    kinds = kinds_of(cluster, able)
    whole = tuple(map(len, kinds))
    for counts in counts_upto(whole, sum(whole)):
        yield tuple(sorted(d for kind, count in zip(kinds, counts, strict=True) for d in kind[len(kind) - count :]))


def _choice(cluster: Cluster, taught: Taught, best: BestStudent, teachers: Devices) -> TaughtChoice:
    trains = [device for device in range(len(cluster)) if device not in teachers]
    part = replace(
        cluster,
        devices=tuple(cluster.devices[device] for device in trains),
        node_of=tuple(cluster.node_of[device] for device in trains),
    )
    student = best(part, not teachers)
    policy = tuple(trains[device] for device in student.placed.devices)
    predicted = student.predicted
    if not teachers:
        return TaughtChoice((), policy, student, dict(predicted.roles).get("teacher", 0.0), predicted.seconds)
    teaching = teaching_seconds(cluster, taught, teachers, policy[0])
    roles = sum(seconds for _, seconds in predicted.roles)
    apart = max(predicted.policy, teaching)
    seconds = roles + taught.lmbda * (predicted.policy + teaching) + (1 - taught.lmbda) * apart
    return TaughtChoice(teachers, policy, student, teaching, seconds)
