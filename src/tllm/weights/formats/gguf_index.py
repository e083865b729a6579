"""The index of a GGUF model: each weight by the name and in the form that the model has, however the file keeps it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tllm.core.errors import ModelError, WeightsError
from tllm.core.gguf_files import gguf_files, read_gguf
from tllm.core.gguf_header import GgufArray, GgufHeader, GgufTensor
from tllm.quantization.blocks import Blocks, Scheme
from tllm.spec.gguf.gguf_names import ARCHITECTURES, FREQUENCIES, OF_HEADS, Architecture, GgufName, parse_name
from tllm.weights.boxes import Box, Shape
from tllm.weights.byte_source import ByteSource
from tllm.weights.formats.gguf_blocks import SCHEMES, blocks_of
from tllm.weights.formats.gguf_joined import experts_by_turns, heads_joined
from tllm.weights.safetensors_header import TensorEntry
from tllm.weights.safetensors_index import Index

NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Types of plain numbers."""


Change = Literal["", "plus_one", "minus_exp"]
CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "plus_one": lambda x: x.float() - 1,
    "minus_exp": lambda x: (-x.double()).log(),
}
"""The weight, of what a file has in its place."""

NORM, BLOCK = re.compile(r".*_norm(_\d)?"), re.compile(r"blk\.(\d{1,9})\.")


@dataclass(frozen=True)
class GgufWeight:
    """One weight of the model, which lies in one tensor of the files, `plane`.

    Quantised tensors are matrices of bytes, of which each block of a row is `block_bytes` for `block` columns.

    - `expert`: which of a stack of experts it is.
    - `head_dim`: rows of a head, where they lie in pairs that turn together. 0 where they lie as the model has them.
    - `first_row`: of the file's tensor, where it holds several weights, their rows one below the other.
    - `change`: what the file has in the weight's place: 1 + weight ("plus_one"), or -exp(weight) ("minus_exp").
    - `inserted`: a dim of width 1 that the model has and the file leaves out.
    """

    shape: Shape
    plane: str
    kind: str
    block: int = 1
    block_bytes: int = 1
    expert: int | None = None
    head_dim: int = 0
    first_row: int = 0
    change: Change = ""
    inserted: int | None = None

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
        rows = tuple(bounds for dim, bounds in enumerate(box[:-1]) if dim != self.inserted)
        if self.first_row:
            rows = ((rows[0][0] + self.first_row, rows[0][1] + self.first_row), *rows[1:])
        stack = () if self.expert is None else ((self.expert, self.expert + 1),)
        return {self.plane: (*stack, *rows, columns)}

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Blocks | Tensor:
        data = planes[self.plane]
        if self.expert is not None:
            data = data.squeeze(0)
        if self.inserted is not None:
            data = data.unsqueeze(self.inserted)
        if self.head_dim:
            data = unpaired(data, self.head_dim)
        if self.kind in SCHEMES:
            return blocks_of(self.kind, data)
        return CHANGED[self.change](data) if self.change else data


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
    join = experts_by_turns if ARCHITECTURES[name].by_turns else heads_joined
    return Index(entries, join(stored, header.file))


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
    """The weights that a tensor holds, by the model's names: one, or one for each expert, gates apart from ups."""
    blocks = _number(header, f"{name}.block_count")
    key = f"{name}.nextn_predict_layers"
    layers = blocks - (_number(header, key) if key in header.metadata else 0)
    block = BLOCK.match(tensor.name)
    if block is not None and layers <= int(block[1]) < blocks:
        return  # a layer that predicts further tokens
    found = parse_name(tensor.name, architecture, layers)
    if found is None:
        raise ModelError(
            f"{tensor.file}: a {name} model of {layers} layers has no tensor {tensor.name!r} in what is handled",
            "it may change the maths",
        )
    kind = tensor.type
    is_norm = NORM.fullmatch(found.part) is not None
    _check_shape(tensor, found, is_norm)
    change: Change = "minus_exp" if found.part == "ssm_a" else ""
    if architecture.norm_offset and is_norm and found.part not in architecture.plain_norms:
        change = "plus_one"
    inserted = 1 if found.part == "ssm_conv1d" else 0 if _is_row(tensor, found) else None
    shape = list(tensor.shape[1:] if found.is_stack else tensor.shape)
    shape[0] //= len(found.weights)
    if inserted is not None:
        shape.insert(inserted, 1)
    for expert in range(tensor.shape[0]) if found.is_stack else [None]:
        for place, weight in enumerate(found.weights):
            yield (
                weight if expert is None else weight.format(expert),
                GgufWeight(
                    shape=tuple(shape),
                    plane=tensor.name,
                    kind=kind.name,
                    block=kind.elements,
                    block_bytes=1 if kind.name in NUMBERS else kind.nbytes,
                    expert=expert,
                    head_dim=_rows_of_head(tensor, header, architecture, found, name),
                    first_row=place * shape[0],
                    change=change,
                    inserted=inserted,
                ),
            )


def _is_row(tensor: GgufTensor, found: GgufName) -> bool:
    """Whether a vector of the file is a matrix of one row in the model."""
    return found.part == "ffn_gate_inp_shexp" and len(tensor.shape) == 1


def _check_shape(tensor: GgufTensor, found: GgufName, is_norm: bool) -> None:
    """Vectors are plain numbers, matrices have two dims, and what experts or heads have is stacked."""
    shape = tensor.shape
    is_vector = is_norm or found.is_other or _is_row(tensor, found) or tensor.name.endswith(".bias")
    is_stack = found.is_stack or tensor.name.endswith("_exps.bias") or found.part in OF_HEADS
    dims = (1 if is_vector else 2) + is_stack
    if len(shape) != dims or shape[found.is_stack] % len(found.weights):
        raise WeightsError(f"{tensor.file}: tensor {tensor.name!r} has shape {shape}, which it cannot have")
    if is_vector and tensor.type.name not in NUMBERS:
        raise WeightsError(
            f"{tensor.file}: tensor {tensor.name!r} is of type {tensor.type.name}, and plain in any model"
        )


def _rows_of_head(
    tensor: GgufTensor, header: GgufHeader, architecture: Architecture, found: GgufName, name: str
) -> int:
    """Rows of a head of q or k, where they lie in pairs; else 0."""
    if not (architecture.paired and found.part in ("attn_q", "attn_k")):
        return 0
    heads = _number(header, f"{name}.attention.head_count")
    if found.part == "attn_k" and f"{name}.attention.head_count_kv" in header.metadata:
        heads = _number(header, f"{name}.attention.head_count_kv")
    rows = tensor.shape[0]
    if not heads or rows % (2 * heads):
        raise WeightsError(f"{tensor.file}: tensor {tensor.name!r} has {rows} rows and there are {heads} heads")
    return rows // heads


def _number(header: GgufHeader, key: str) -> int:
    value = header.metadata.get(key)
    if isinstance(value, GgufArray) and len(set(value.values())) == 1:  # one for each layer
        value = value.values()[0]
    if not isinstance(value, int) or isinstance(value, bool):
        raise WeightsError(f"{header.file}: {key} is {value!r} and should be a whole number")
    return value
