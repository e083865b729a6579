"""`MemorySnapshots`: the snapshots of the run's last steps in a rank's memory, of its own boxes and of others'. They
outlive the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tllm.training.checkpoint.shard_assignment import HeldBox
from tllm.training.state.tensor_blocks import TensorBlock
from tllm.weights.boxes import widths
from tllm.weights.dtypes import DTYPES


class SnapshotLabel(NamedTuple):
    """What a snapshot is of. Those of one step made in two epochs, perhaps under two plans, are never mixed."""

    step: int
    epoch: int


NEVER = SnapshotLabel(-1, -1)


class StepSnapshot:
    """Some boxes as they were after one step. `label` is NEVER while they are being written.

    `data_position` says where in the data the next step begins, in snapshots of a rank's own boxes.
    """

    def __init__(self, boxes: Sequence[HeldBox]) -> None:
        self.label = NEVER
        self.data_position = b""
        self.blocks = [
            TensorBlock(held.name, held.box, torch.empty(widths(held.box), dtype=DTYPES[held.dtype])) for held in boxes
        ]


class SnapshotPair:
    """Two snapshots of the same boxes: while one is written, the other is of a step that is complete on all ranks."""

    def __init__(self, boxes: Sequence[HeldBox]) -> None:
        self.boxes = list(boxes)
        self.snapshots = (StepSnapshot(boxes), StepSnapshot(boxes))

    def next_to_write(self) -> StepSnapshot:
        """The older one, which from now on is of no step until it is written."""
        older = min(self.snapshots, key=lambda snapshot: snapshot.label)
        older.label = NEVER
        return older


class MemorySnapshots:
    """The pairs of the present epoch. Those of an epoch that is over stay until all that they hold is copied anew."""

    def __init__(self) -> None:
        self._pairs: list[SnapshotPair] = []
        self._before: list[SnapshotPair] = []

    def complete(self) -> list[StepSnapshot]:
        """Every snapshot that is of some step."""
        pairs = [*self._pairs, *self._before]
        return [snapshot for pair in pairs for snapshot in pair.snapshots if snapshot.label != NEVER]

    def allocate(self, wanted: Sequence[Sequence[HeldBox]]) -> list[SnapshotPair]:
        """A pair for each of these lists of boxes, in a new epoch. A pair of the same boxes is used again, as it is."""
        left = [*self._pairs, *self._before]
        self._pairs = []
        for boxes in wanted:
            same = next((pair for pair in left if pair.boxes == list(boxes)), None)
            if same is not None:
                left.remove(same)
            self._pairs.append(same or SnapshotPair(boxes))
        self._before = left
        return self._pairs

    def keep_only(self, label: SnapshotLabel) -> None:
        """Let snapshots of any other label be of no step."""
        for snapshot in self.complete():
            if snapshot.label != label:
                snapshot.label = NEVER

    def free_old(self) -> None:
        """Give back the memory of epochs that are over."""
        self._before = []
