"""`MemorySnapshots`: what a rank has in memory of the run's last steps, its own and others' boxes; it outlives the
plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tllm.train.checkpoint.shard_assignment import HeldBox
from tllm.train.state.tensor_blocks import TensorBlock
from tllm.weights.boxes import widths
from tllm.weights.dtypes import DTYPES


class SnapshotLabel(NamedTuple):
    """What a copy is of. Copies of one step that were made in two epochs, maybe under two plans, are never mixed."""

    step: int
    epoch: int


NEVER = SnapshotLabel(-1, -1)


class StepSnapshot:
    """Some boxes as they were after one step. `label` is NEVER while they are being written.

    `place` says where in the data the next step begins, in a rank's own copies.
    """

    def __init__(self, boxes: Sequence[HeldBox]) -> None:
        self.label = NEVER
        self.place = b""
        self.blocks = [
            TensorBlock(one.name, one.box, torch.empty(widths(one.box), dtype=DTYPES[one.dtype])) for one in boxes
        ]


class Pair:
    """Two copies of the same boxes: while one is written, the other is of a step that is whole on all ranks."""

    def __init__(self, boxes: Sequence[HeldBox]) -> None:
        self.boxes = list(boxes)
        self.copies = (StepSnapshot(boxes), StepSnapshot(boxes))

    def older(self) -> StepSnapshot:
        """The one to be written, which from now on is of no step."""
        copy = min(self.copies, key=lambda one: one.label)
        copy.label = NEVER
        return copy


class MemorySnapshots:
    """Pairs by what they are of. Those of an epoch that is over stay until all that they hold is kept anew."""

    def __init__(self) -> None:
        self._pairs: list[Pair] = []
        self._before: list[Pair] = []

    def whole(self) -> list[StepSnapshot]:
        """Every copy that is of some step."""
        pairs = [*self._pairs, *self._before]
        return [copy for pair in pairs for copy in pair.copies if copy.label != NEVER]

    def begin(self, wanted: Sequence[Sequence[HeldBox]]) -> list[Pair]:
        """A pair for each of these lists of boxes. Memory of the same boxes is used again, as it is."""
        left = [*self._pairs, *self._before]
        self._pairs = []
        for boxes in wanted:
            same = next((pair for pair in left if pair.boxes == list(boxes)), None)
            if same is not None:
                left.remove(same)
            self._pairs.append(same or Pair(boxes))
        self._before = left
        return self._pairs

    def keep_only(self, label: SnapshotLabel) -> None:
        """Let copies of any other label be of no step."""
        for copy in self.whole():
            if copy.label != label:
                copy.label = NEVER

    def forget(self) -> None:
        """Give back the memory of epochs that are over."""
        self._before = []
