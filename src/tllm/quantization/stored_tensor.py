"""`StoredTensor`: a weight that a checkpoint's files keep otherwise than as plain numbers in the weight's own shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from tllm.quantization.blocks import Blocks, Scheme

Box = tuple[tuple[int, int], ...]
"""[start, stop) of each dim, as in `weights.boxes`."""


class StoredTensor(Protocol):
    """One weight of the model, made of one or more tensors of the files, its planes.

    Formats pack several weights into a word or a block, put rows in another order, stack experts, or keep another
    number than the model needs. All boxes are of the weight as the model has it: [outputs, inputs], or any shape.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight as the model has it."""
        ...

    @property
    def scheme(self) -> Scheme | None:
        """How its codes are to be read; None where `decode` gives plain numbers."""
        ...

    def aligned(self, box: Box) -> Box:
        """The smallest box that holds this one and can be read: whole words and blocks, whole groups."""
        ...

    def plane_boxes(self, box: Box) -> dict[str, Box]:
        """For an aligned box, the box of each tensor of the files that holds it, by that tensor's name."""
        ...

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Blocks | Tensor:
        """What is in an aligned box, from what `plane_boxes` names, each in the files' dtype.

        WeightsError where the bytes cannot be of this format.
        """
        ...
