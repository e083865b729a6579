"""`SpareNode`: a node without a rank of the plan, whose memory may hold snapshots from which the ranks go on."""

from __future__ import annotations

from tllm.training.report.events import IsStopped, OnEvent, TrainerReady
from tllm.training.snapshot.replication import SnapshotReplicator
from tllm.weights.load import Progress


class SpareNode:
    """In the place of a `RankTrainer`: `prepare` gives the ranks the snapshots that they lack, and that is all."""

    compute_seconds = 0.0

    def __init__(self, replicator: SnapshotReplicator) -> None:
        self._replicator = replicator

    def prepare(self, progress: Progress | None = None) -> TrainerReady:
        return TrainerReady(self._replicator.lend(progress), 0, 0)

    def run(self, on_event: OnEvent, is_stopped: IsStopped = lambda: False) -> None:
        """Nothing: this node waits for another role."""

    def close(self) -> None:
        self._replicator.close()
