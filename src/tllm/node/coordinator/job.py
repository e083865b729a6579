"""`ClusterJob`: what a coordinator brings nodes together for, as the coordinator calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tllm.cluster.channel import Act
from tllm.cluster.messages import Prepared
from tllm.core.errors import TllmError
from tllm.node.coordinator.workload import Workload
from tllm.weights.coverage import HeldBlock, check_coverage


class ClusterJob(Protocol):
    """What the nodes do: serve, train, be examined, be compared or be surveyed.

    A job owns its `Coordinator`, which knows nothing of the work and calls back here. `fault` is what the work cannot
    go on for at present; None while all is well.
    """

    fault: TllmError | None

    def fail(self, error: TllmError) -> None:
        """The cluster cannot go on: sets `fault`, and whoever waits for the job receives this error."""

    def check(self, prepared: Mapping[int, Prepared]) -> None:
        """Refuse what the ranks are about to load, by rank, if all of it together is not what it should be."""

    def acts(self, node: str) -> Mapping[type, Act]:
        """What to do with a node's messages, by their type, beside those that the coordinator itself handles."""

    def adopt(self, work: Workload) -> Workload:
        """Take up work that was chosen for the nodes that are here; what the coordinator is to run then."""


def check_pieces(prepared: Mapping[int, Prepared]) -> None:
    """PlanError unless each element that the model needs is held once, or as often as the plan means it to be."""
    held = {
        rank: [HeldBlock(piece.name, piece.source, piece.replicated) for piece in one.pieces]
        for rank, one in prepared.items()
    }
    check_coverage(held, prepared[0].needed)
