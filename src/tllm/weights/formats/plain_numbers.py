"""Reads a part of any weight as plain numbers, whatever form the files keep it in."""

from __future__ import annotations

from torch import Tensor

from tllm.quantization.blocks import Blocks, dequantize
from tllm.weights.boxes import Box, whole, within
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
