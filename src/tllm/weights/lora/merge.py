"""A model's weights with an adapter's updates added: W + scale B A, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tllm.parallel.lora import tensor_names
from tllm.weights.boxes import Shape
from tllm.weights.byte_source import ByteSource
from tllm.weights.load import read_piece
from tllm.weights.lora.adapter_files import Adapter
from tllm.weights.safetensors_index import Index


@dataclass(frozen=True)
class AdapterSource:
    """An adapter and where its tensors are read."""

    adapter: Adapter
    source: ByteSource

    def update(self, module: str) -> Tensor | None:
        """scale B A of a module in float64, [outputs, inputs]; None for one that is not adapted."""
        if module not in self.adapter.modules:
            return None
        a, b = (self.adapter.index.slice(self.source, name).double() for name in tensor_names(module))
        return (b @ a).mul_(self.adapter.modules[module].scale)


@dataclass(frozen=True)
class MergedTensor:
    """A tensor of a model's files as plain numbers, with what adapters add to it. Sums are in float64, rounded once."""

    name: str
    shape: Shape
    dtype: torch.dtype
    index: Index
    source: ByteSource
    adapters: tuple[AdapterSource, ...]

    def make(self) -> Tensor:
        plain = read_piece(self.name, (), self.index, self.source)
        for one in self.adapters:
            update = one.update(self.name.removesuffix(".weight"))
            if update is not None:
                plain = plain.double().add_(update)
        return plain.to(self.dtype)


def merged_tensors(
    shapes: Mapping[str, Shape],
    index: Index,
    source: ByteSource,
    adapters: Iterable[AdapterSource] = (),
    dtype: torch.dtype | None = None,
) -> Iterator[MergedTensor]:
    """Every tensor of a model (`shapes`, by the checkpoint's names), with adapters merged into it.

    `dtype` None keeps that of the files; weights that these have in few bits become plain numbers of bfloat16.
    """
    merged = tuple(adapters)
    for name, shape in shapes.items():
        own = torch.bfloat16 if name in index.stored else index.entry(name).dtype
        yield MergedTensor(name, shape, dtype or own, index, source, merged)
