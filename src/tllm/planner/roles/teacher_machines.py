"""Seconds in which teachers judge the rows of a step (`tllm teach`). A free teacher takes the next row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.rank_work import JudgeFacts
from tllm.planner.simulate.role_seconds import dealt_seconds


@dataclass(frozen=True)
class Taught:
    """A teacher, the bytes of what it says of one row, and the share of steps whose completions the student writes."""

    teacher: JudgeFacts
    answer_bytes: float
    lmbda: float = 0.0


def teaching_seconds(cluster: Cluster, taught: Taught, teachers: Sequence[int], student: int = 0) -> float:
    """Until all rows of a step are judged; answers travel meanwhile."""

    def answer(teacher: int) -> float:
        return taught.answer_bytes / cluster.link(teacher, student).rate(taught.answer_bytes)

    return dealt_seconds(taught.teacher, cluster.as_serving(), teachers, answer)
