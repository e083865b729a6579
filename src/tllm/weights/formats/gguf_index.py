"""The index of a GGUF model: each weight by the name and in the form that the model has, however the file keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tllm.core.errors import ModelError, WeightsError
from tllm.core.gguf_files import gguf_files, read_gguf
from tllm.core.gguf_header import GgufArray, GgufHeader, GgufTensor
from tllm.quantization.blocks import Blocks, Scheme
from tllm.spec.gguf.gguf_names import ARCHITECTURES, FREQUENCIES, Architecture, parse_name
from tllm.weights.boxes import Box, Shape
from tllm.weights.byte_source import ByteSource
from tllm.weights.formats.gguf_blocks import SCHEMES, blocks_of
from tllm.weights.safetensors_header import TensorEntry
from tllm.weights.safetensors_index import Index

NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Types of plain numbers."""


@dataclass(frozen=True)
class GgufWeight:
    """One weight of the model, which lies in one tensor of the files, `plane`.

    Quantised tensors are matrices of bytes, of which each block of a row is `block_bytes` for `block` columns.

    - `expert`: which of a stack of experts it is.
    - `head_dim`: rows of a head, where they lie in pairs that turn together. 0 where they lie as the model has them.
    - `less_one`: the file holds 1 + weight.
    - `is_row`: the model has the file's vector as a matrix of one row.
    """

    shape: Shape
    plane: str
    kind: str
    block: int = 1
    block_bytes: int = 1
    expert: int | None = None
    head_dim: int = 0
    less_one: bool = False
    is_row: bool = False

    @property
    def scheme(self) -> Scheme | None:
        return SCHEMES.get(self.kind)

    def aligned(self, box: Box) -> Box:
        """Whole blocks of columns, and whole heads where their rows are to be put back."""
        bounds = list(box)
        if self.head_dim:
            bounds[0] = _outward(bounds[0], self.head_dim)
        bounds[-1] = _outward(bounds[-1], self.block)
        return tuple(bounds)

    def plane_boxes(self, box: Box) -> dict[str, Box]:
        start, stop = box[-1]
        columns = (start // self.block * self.block_bytes, stop // self.block * self.block_bytes)
        rows = () if self.is_row else box[:-1]
        stack = () if self.expert is None else ((self.expert, self.expert + 1),)
        return {self.plane: (*stack, *rows, columns)}

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Blocks | Tensor:
        data = planes[self.plane]
        if self.expert is not None:
            data = data.squeeze(0)
        if self.is_row:
            data = data.unsqueeze(0)
        if self.head_dim:
            data = unpaired(data, self.head_dim)
        if self.kind in SCHEMES:
            return blocks_of(self.kind, data)
        return data.float() - 1 if self.less_one else data


def unpaired(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of whole heads whose pairs (2i, 2i + 1) turn together, as halves (i, i + head_dim / 2) that do."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).flatten(0, 2)


def _outward(bounds: tuple[int, int], unit: int) -> tuple[int, int]:
    start, stop = bounds
    return start // unit * unit, -(-stop // unit) * unit


def gguf_index(source: ByteSource) -> Index:
    """Read the headers of the files. ModelError for a tensor that is not known or of a type that is not read."""
    header = read_gguf(gguf_files(source.names()), source.size, source.read)
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(
            f"{header.file}: architecture {name!r} is not known", "known: " + ", ".join(sorted(ARCHITECTURES))
        )
    entries = {tensor.name: _entry(tensor) for tensor in header.tensors.values()}
    stored: dict[str, GgufWeight] = {}
    for tensor in header.tensors.values():
        if FREQUENCIES.fullmatch(tensor.name):
            continue
        for weight, how in _weights(tensor, header, ARCHITECTURES[name], name):
            if weight in stored:
                raise WeightsError(f"{tensor.file}: {tensor.name!r} and {stored[weight].plane!r} are both {weight}")
            stored[weight] = how
    return Index(entries, stored)


def _entry(tensor: GgufTensor) -> TensorEntry:
    """A tensor as the bytes that it has in the file."""
    kind, shape = tensor.type, tensor.shape
    if kind.name in NUMBERS:
        return TensorEntry(tensor.file, NUMBERS[kind.name], shape, tensor.start, tensor.stop)
    if kind.name not in SCHEMES:
        raise ModelError(
            f"{tensor.file}: tensor {tensor.name!r} is of type {kind.name}, which is not read",
            "known: " + ", ".join([*NUMBERS, *SCHEMES]),
        )
    shape = (*shape[:-1], shape[-1] // kind.elements * kind.nbytes)
    return TensorEntry(tensor.file, torch.uint8, shape, tensor.start, tensor.stop)


def _weights(
    tensor: GgufTensor, header: GgufHeader, architecture: Architecture, name: str
) -> Iterator[tuple[str, GgufWeight]]:
    """The weights that a tensor holds, by the model's names: one, or one for each expert."""
    layers = _number(header, f"{name}.block_count")
    found = parse_name(tensor.name, architecture, layers)
    if found is None:
        raise ModelError(
            f"{tensor.file}: a {name} model of {layers} layers has no tensor {tensor.name!r} in what is handled",
            "it may change the maths",
        )
    kind, shape = tensor.type, tensor.shape
    is_norm = found.part.endswith("_norm")
    is_row = found.part == "ffn_gate_inp_shexp" and len(shape) == 1
    if len(shape) != (1 if is_norm or is_row or tensor.name.endswith(".bias") else 2) + found.is_stack:
        raise WeightsError(f"{tensor.file}: tensor {tensor.name!r} has shape {shape}, which it cannot have")
    rows_of_head = 0
    if architecture.paired and found.part in ("attn_q", "attn_k"):
        heads = _number(header, f"{name}.attention.head_count")
        if found.part == "attn_k" and f"{name}.attention.head_count_kv" in header.metadata:
            heads = _number(header, f"{name}.attention.head_count_kv")
        if not heads or shape[0] % (2 * heads):
            raise WeightsError(f"{tensor.file}: tensor {tensor.name!r} has {shape[0]} rows and there are {heads} heads")
        rows_of_head = shape[0] // heads
    for expert in range(shape[0]) if found.is_stack else [None]:
        yield (
            found.weight if expert is None else found.weight.format(expert),
            GgufWeight(
                shape=(1, *shape) if is_row else shape if expert is None else shape[1:],
                plane=tensor.name,
                kind=kind.name,
                block=kind.elements,
                block_bytes=1 if kind.name in NUMBERS else kind.nbytes,
                expert=expert,
                head_dim=rows_of_head,
                less_one=architecture.norm_offset and is_norm,
                is_row=is_row,
            ),
        )


def _number(header: GgufHeader, key: str) -> int:
    value = header.metadata.get(key)
    if isinstance(value, GgufArray) and len(set(value.values())) == 1:  # one for each layer
        value = value.values()[0]
    if not isinstance(value, int) or isinstance(value, bool):
        raise WeightsError(f"{header.file}: {key} is {value!r} and should be a whole number")
    return value
