"""`SpareNode`: a node that has no rank of the plan, but something in memory that the ranks go on from."""

from __future__ import annotations

from tllm.train.snapshot.replication import SnapshotReplicator
from tllm.train.trainer import IsStopped, Ready, Tell
from tllm.weights.load import Progress


class SpareNode:
    """What a `Trainer` is to a rank: `prepare` gives the others what they lack, and that is all."""

    computing = 0.0

    def __init__(self, mirror: SnapshotReplicator) -> None:
        self._mirror = mirror

    def prepare(self, progress: Progress | None = None) -> Ready:
        return Ready(self._mirror.lend(progress), 0, 0)

    def run(self, tell: Tell, is_stopped: IsStopped = lambda: False) -> None:
        """Nothing: this node waits for another part."""

    def close(self) -> None:
        self._mirror.close()
