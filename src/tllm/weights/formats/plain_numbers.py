"""Weights as plain numbers, whatever form the files keep them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tllm.quantization.blocks import Blocks, dequantize
from tllm.quantization.stored_tensor import StoredTensor
from tllm.spec.quantized.weight_bits import has_products
from tllm.weights.boxes import Box, Shape, whole, within
from tllm.weights.byte_source import ByteSource
from tllm.weights.load import part
from tllm.weights.safetensors_index import Index


def read_plain(index: Index, source: ByteSource, name: str, box: Box = ()) -> Tensor:
    """A box of a weight, `()` being all of it: in the files' dtype, or in float32 where they have it in few bits."""
    stored = index.stored.get(name)
    if stored is None:
        return index.slice(source, name, box)
    box = box or whole(stored.shape)
    found = read_blocks(index, source, name, box)
    numbers = dequantize(found) if isinstance(found, Blocks) else found
    return part(numbers, within(box, stored.aligned(box)))


def read_blocks(index: Index, source: ByteSource, name: str, box: Box) -> Blocks | Tensor:
    """What the aligned box of a box holds of a weight that the files keep in another form."""
    stored = index.stored[name]
    planes = {plane: index.slice(source, plane, at) for plane, at in index.planes(name, box).items()}
    return stored.decode(stored.aligned(box), planes)


@dataclass(frozen=True)
class DequantizedTensor:
    """A weight in groups that no product reads: it is decoded to plain numbers."""

    stored: StoredTensor

    scheme = None

    @property
    def shape(self) -> Shape:
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
