"""`open_index`: the index of a model's files, whatever form they keep its weights in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tllm.core.errors import WeightsError
from tllm.core.gguf_files import gguf_files
from tllm.quantization.blocks import plain_numbers
from tllm.quantization.stored_tensor import Box, StoredTensor
from tllm.spec.families import spec_from_config
from tllm.spec.quantized.quantization_config import read_quantization
from tllm.spec.quantized.weight_bits import Quantization, has_products
from tllm.weights.byte_source import ByteSource
from tllm.weights.formats.awq import read_awq
from tllm.weights.formats.compressed_tensors import read_compressed_tensors
from tllm.weights.formats.fp8 import read_fp8
from tllm.weights.formats.gguf_index import gguf_index
from tllm.weights.formats.gptq import read_gptq
from tllm.weights.formats.mlx import read_mlx
from tllm.weights.formats.mxfp4 import read_mxfp4
from tllm.weights.formats.rounded_tensor import rounded_tensors
from tllm.weights.formats.stacked_experts import with_experts_apart
from tllm.weights.safetensors_header import TensorEntry
from tllm.weights.safetensors_index import Index

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Reader = Callable[[Index, Quantization], Index]
"""reader(index of the files, what the config says of them) -> the index with the weights that are in few bits too."""

READERS: dict[str, Reader] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "mxfp4": read_mxfp4,
    "mlx": read_mlx,
}
"""Of each method of `spec.quantized.quantization_config`."""


def open_index(source: ByteSource, config: Mapping[str, Any]) -> Index:
    """Read the headers of a model's files; `config` is its `config.json`, which says how weights are quantised.

    Where it asks for plain weights to be rounded (`spec.quantized.weight_form`), the index has them so.
    """
    index = _index_of_files(source, config)
    return Index(index.entries, {**index.stored, **rounded_tensors(index, config)}, _tied(index, config))


def _tied(index: Index, config: Mapping[str, Any]) -> dict[str, str]:
    """The table and the head of a model whose table is its head, where the files have both."""
    if TABLE not in index or HEAD not in index or "model_type" not in config:
        return {}
    spec = spec_from_config(dict(config))
    return {TABLE: HEAD} if spec.tied and not spec.is_headless else {}


def _index_of_files(source: ByteSource, config: Mapping[str, Any]) -> Index:
    if gguf_files(source.names()):
        return gguf_index(source)
    index = with_experts_apart(Index.read(source), config)
    quantization = read_quantization(config)
    if quantization is not None:
        found = READERS[quantization.method](index, quantization)
        index = Index(found.entries, {name: readable(stored) for name, stored in found.stored.items()})
    for name, entry in index.entries.items():
        if entry.dtype.itemsize == 1 and entry.dtype.is_floating_point and name.endswith(".weight"):
            _check_read(index, name, entry)
    return index


def _check_read(index: Index, name: str, entry: TensorEntry) -> None:
    """A number of 8 bits is read as the model's weight only by a format that knows its scale."""
    if name not in index.stored:
        raise WeightsError(
            f"{entry.file}: weight {name!r} is in {str(entry.dtype).removeprefix('torch.')} and nothing says its scale",
            "does config.json belong to these weights? It needs a quantization_config",
        )


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
        return plain_numbers(self.stored.decode(box, planes))


def readable(stored: StoredTensor) -> StoredTensor:
    """The weight itself, or as plain numbers where a row has several groups and no product reads them."""
    scheme = stored.scheme
    if scheme is None or scheme.group >= stored.shape[-1] or has_products(scheme.group):
        return stored
    return DequantizedTensor(stored)
