"""`DequantizedTensor`: a weight of few bits that no product reads, decoded to plain numbers while it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tllm.quantization.blocks import Blocks, dequantize
from tllm.quantization.stored_tensor import Box, StoredTensor
from tllm.spec.quantized.weight_bits import has_products


@dataclass(frozen=True)
class DequantizedTensor:
    """A weight in groups that no product reads: it is decoded to plain numbers."""

    stored: StoredTensor

    scheme = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def aligned(self, box: Box) -> Box:
        return self.stored.aligned(box)

    def plane_boxes(self, box: Box) -> dict[str, Box]:
        return self.stored.plane_boxes(box)

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Tensor:
        found = self.stored.decode(box, planes)
        return dequantize(found) if isinstance(found, Blocks) else found


def readable(stored: StoredTensor) -> StoredTensor:
    """The weight itself, or as plain numbers where a row has several groups and no product reads them."""
    scheme = stored.scheme
    if scheme is None or scheme.group >= stored.shape[-1] or has_products(scheme.group):
        return stored
    return DequantizedTensor(stored)
