"""Seconds in which teachers judge the rows of a step, each of them the next that is free for a row (`tllm teach`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import TeacherFacts
from tllm.planner.simulate.role_seconds import teacher_seconds


@dataclass(frozen=True)
class Taught:
    """A teacher, the bytes of what it says of one row, and the share of steps whose completions the student writes."""

    teacher: TeacherFacts
    answer_bytes: float
    lmbda: float = 0.0


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
