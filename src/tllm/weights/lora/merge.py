"""A model's weights with an adapter's updates added: W + scale B A, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tllm.parallel.lora.lora_update import magnitude_name, tensor_names
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

    def merged(self, module: str, weight: Tensor) -> Tensor:
        """W + scale B A of a module in float64, [outputs, inputs], with DoRA its rows of the learned magnitudes.

        W itself for a module that is not adapted.
        """
        if module not in self.adapter.modules:
            return weight
        _, scale, use_dora = self.adapter.modules[module]
        a, b = (self._read(name) for name in tensor_names(module))
        whole = (b @ a).mul_(scale).add_(weight.double())
        if not use_dora:
            return whole
        return whole.mul_((self._read(magnitude_name(module)) / whole.norm(dim=1))[:, None])

    def _read(self, name: str) -> Tensor:
        return self.adapter.index.slice(self.source, name).double()


@dataclass(frozen=True)
class MergedTensor:
    """A tensor of a model's files as plain numbers, with what adapters add to it. Sums are in float64, rounded once.

    Of a tensor of all experts, [experts, inputs, outputs], the modules are those of each expert.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    index: Index
    source: ByteSource
    adapters: tuple[AdapterSource, ...]

    def make(self) -> Tensor:
        plain = read_piece(self.name, (), self.index, self.source)
        module = self.name.removesuffix(".weight")
        if plain.dim() != 3:
            return self._merged(module, plain)
        block, _, part = module.rpartition(".")
        if not any(f"{block}.0.{part}" in one.adapter.modules for one in self.adapters):
            return plain.to(self.dtype)
        whole = torch.empty_like(plain, dtype=self.dtype)  # in float64 only one expert at a time
        for expert, weight in enumerate(plain):
            whole[expert] = self._merged(f"{block}.{expert}.{part}", weight.t()).t()
        return whole

    def _merged(self, module: str, weight: Tensor) -> Tensor:
        for one in self.adapters:
            weight = one.merged(module, weight)
        return weight.to(self.dtype)


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
