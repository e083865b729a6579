"""`TrainingConstraints`: what the search for a training plan has to keep to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tllm.planner.cost.rank_work import TrainingFacts
from tllm.spec.plan import Plan

MICROBATCHES = (1, 2, 4, 8, 16, 32)
"""Rows of a microbatch that are tried."""


def accept(plan: Plan, facts: TrainingFacts) -> None:
    """The check that refuses no plan."""


@dataclass(frozen=True)
class TrainingConstraints:
    """What the search may not choose."""

    microbatch_sizes: tuple[int, ...] = MICROBATCHES
    first_device: int | None = None
    """The device that rank 0 must run on."""
    check: Callable[[Plan, TrainingFacts], None] = accept
    """Raises PlanError for a plan that must not be chosen."""
