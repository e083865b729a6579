"""`PlanMove`: a cluster's move from one plan to another, taken back if the new plan does not work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.coordinator.workload import Workload
from tllm.node.recovery.rank_placement import RankPlacement
from tllm.spec.plan import Plan

log = logging.getLogger("tllm.node")


class PlanMove:
    """Keeps which node has which rank (`placement`) of the coordinator's plan, and what both were before a move.

    `is_pending`: an epoch under the plan is still to begin.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.placement = RankPlacement(coordinator.work.plan.world_size, coordinator.first)
        self.is_pending = False
        self._before: tuple[Workload, RankPlacement] | None = None

    def begin(self, plan: Plan, nodes: Sequence[str]) -> None:
        """Go over to another plan, whose ranks these nodes take in order."""
        self._before = (self._coordinator.work, self.placement)
        self._coordinator.work = replace(self._coordinator.work, plan=plan)
        self.placement = RankPlacement(plan.world_size, nodes)
        self.is_pending = True

    def confirm(self) -> None:
        """The move went well, and is not taken back any more."""
        self._before = None

    def take_back(self, why: str) -> bool:
        """Return to the plan before a move that did not go well. False where there is none to take back."""
        if self._before is None:
            return False
        moved = self._coordinator.work.plan
        (self._coordinator.work, self.placement), self._before = self._before, None
        self.is_pending = True
        log.warning("the move to plan %s failed: %s; goes back to plan %s", moved, why, self._coordinator.work.plan)
        return True
