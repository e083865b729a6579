"""`MemorySnapshots`: snapshots of the last steps in a rank's memory, of its own state and of others'. They outlive the
plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tllm.training.checkpoint.shard_assignment import HeldBox
from tllm.training.state.tensor_blocks import TensorBlock
from tllm.training.state.train_state import FlatMemory
from tllm.weights.boxes import widths
from tllm.weights.dtypes import DTYPES


class SnapshotLabel(NamedTuple):
    """What a snapshot is of. Those of one step made in two epochs, perhaps under two plans, are never mixed."""

    step: int
    epoch: int


NEVER = SnapshotLabel(-1, -1)


class StepSnapshot:
    """Some blocks as they were after one step. `label` is NEVER while they are being written.

    `data_position` says where in the data the next step begins, b"" where the rank that it is of does not know.
    """

    def __init__(self, blocks: Sequence[TensorBlock]) -> None:
        self.label = NEVER
        self.data_position = b""
        self.blocks = blocks


class LiveState(StepSnapshot):
    """The weights and optimizer states themselves: a snapshot that nobody has copied, until the next update begins.

    Where a rank was stopped by another's loss before it updated its weights, they are those of the last step, and the
    rank goes on from them. Only what was lost must come from elsewhere. The blocks are views of `memory`, in which the
    next part may lie too: as long as that restores this very step, nothing is written there.
    """

    def __init__(self, blocks: Sequence[TensorBlock], memory: FlatMemory) -> None:
        super().__init__(blocks)
        self.memory, self._begun = memory, memory.begun

    def set(self, label: SnapshotLabel, data_position: bytes) -> None:
        """They are those of this step now."""
        self.label, self.data_position, self._begun = label, data_position, self.memory.begun

    @property
    def is_unchanged(self) -> bool:
        """Whether they are still those of the step that `label` says."""
        return self._begun == self.memory.begun

    @property
    def nbytes(self) -> int:
        return sum(block.tensor.nbytes for block in self.blocks)


class SnapshotPair:
    """Two snapshots of the same boxes: while one is written, the other is of a step that is complete on all ranks."""

    def __init__(self, boxes: Sequence[HeldBox]) -> None:
        self.boxes = list(boxes)
        self.snapshots = (StepSnapshot(_empty(boxes)), StepSnapshot(_empty(boxes)))

    def next_to_write(self) -> StepSnapshot:
        """The older one, which from now on is of no step until it is written."""
        older = min(self.snapshots, key=lambda snapshot: snapshot.label)
        older.label = NEVER
        return older


def _empty(boxes: Sequence[HeldBox]) -> list[TensorBlock]:
    return [TensorBlock(held.name, held.box, torch.empty(widths(held.box), dtype=DTYPES[held.dtype])) for held in boxes]


class MemorySnapshots:
    """The pairs of the present epoch. Those of an epoch that is over stay until all that they hold is copied anew.

    `live` is the state that the ranks compute with, None where it is of no use to the next epoch.
    """

    def __init__(self) -> None:
        self._pairs: list[SnapshotPair] = []
        self._before: list[SnapshotPair] = []
        self.live: LiveState | None = None

    def complete(self) -> list[StepSnapshot]:
        """Every snapshot that is of some step."""
        live = [self.live] if self.live is not None and self.live.is_unchanged else []
        pairs = [*self._pairs, *self._before]
        every = [*live, *(snapshot for pair in pairs for snapshot in pair.snapshots)]
        return [snapshot for snapshot in every if snapshot.label != NEVER]

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

    def free_live(self, room: int, needed: int) -> None:
        """Keep the live state only where a part that takes as much again finds room beside it. `needed`: bytes of the
        part that comes, as far as they are known."""
        if self.live is not None and room < max(needed, self.live.nbytes):
            self.live = None

    def free_old(self) -> None:
        """Give back the memory of epochs that are over."""
        self._before, self.live = [], None
