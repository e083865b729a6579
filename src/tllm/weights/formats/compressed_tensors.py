"""compressed-tensors folders: integers packed into words, or one code a byte (int8, FP8), with scales of each shape.

Packed: `weight_packed` int32 [outputs, inputs / pack], the lowest bits first, codes as q + 2^(bits - 1);
`weight_zero_point` likewise along the outputs [outputs / pack, groups]; `weight_shape`. Else `weight` int8 or
float8_e4m3fn and `weight_zero_point` int8 [outputs, groups]. `weight_scale` is [outputs, groups], [outputs, 1], one
number, or one for each block. `weight_g_idx` has the group of each input, where they were reordered. A weight is
(q - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tllm.core.errors import WeightsError
from tllm.quantization.blocks import Blocks
from tllm.quantization.stored_tensor import Box, StoredTensor
from tllm.spec.quantized.weight_bits import Coding, Quantization
from tllm.weights.formats.matrix_planes import (
    ALL,
    SCALES,
    PackedMatrix,
    Plane,
    check,
    check_columns_of_groups,
    column_unit,
    modules_with,
    of_scattered,
    part_of,
    refuse,
    required,
    unpacked,
)
from tllm.weights.formats.module_codings import coding_of, scheme_of
from tllm.weights.formats.scaled_matrix import FP8, expanded, plane_of, scaled_matrix
from tllm.weights.safetensors_header import TensorEntry
from tllm.weights.safetensors_index import Index

PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
CODES = (torch.int8, FP8)


class CompressedMatrix(PackedMatrix):
    """The planes of one linear whose codes are packed into words."""

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Blocks | Tensor:
        bits, (outputs, inputs) = self.coding.bits, self.shape
        pack = 32 // bits
        shape = self.tensor("shape", planes).tolist()
        if shape != [outputs, inputs]:
            raise WeightsError(
                f"{self.name}: weight_shape is {shape} and weight_packed has {outputs} rows of {inputs} codes",
                f"weights whose inputs are no multiple of {pack} are not read; is the file whole?",
            )
        codes = part_of(unpacked(self.tensor("codes", planes), bits), box, 1, pack)
        scales = expanded(self.scales(planes), self.planes["scales"], box)
        zeros = None
        if "zeros" in self.planes:
            zeros = part_of(unpacked(self.tensor("zeros", planes).t(), bits), box, 0, pack).t().contiguous()
        if self.scheme is None:
            zero = float(1 << (bits - 1)) if zeros is None else zeros.float()
            return of_scattered(self.name, codes.float(), zero, scales, self.tensor("groups", planes))
        if "groups" in self.planes:
            check_columns_of_groups(self.name, self.tensor("groups", planes), box, self.scheme.group)
        return Blocks(self.scheme, codes.contiguous(), scales, zeros=zeros)


def read_compressed_tensors(index: Index, quantization: Quantization) -> Index:
    """The index with each quantised linear by its `.weight`; a plane that is missing, or without codes, is an error."""
    stored: dict[str, StoredTensor] = {}
    coded = {name.removesuffix(".weight") for name, entry in index.entries.items() if _is_coded(name, entry)}
    for module in sorted({*modules_with(index, PARTS), *coded}):
        entry = index.entries.get(f"{module}.weight")
        if entry is not None and module not in coded and f"{module}.weight_packed" not in index.entries:
            kind = str(entry.dtype).removeprefix("torch.")
            refuse(entry, f"{module}.weight", f"holds {kind} and has scales, as int8 and float8_e4m3fn have")
        if module in coded:
            stored[f"{module}.weight"] = _bytes(index, module, quantization)
        else:
            stored[f"{module}.weight"] = _words(index, module, coding_of(quantization, index, module))
    return replace(index, stored={**index.stored, **stored})


def _is_coded(name: str, entry: TensorEntry) -> bool:
    return name.endswith(".weight") and entry.dtype in CODES


def _bytes(index: Index, module: str, quantization: Quantization) -> StoredTensor:
    codes = index.entries[f"{module}.weight"]
    plain = replace(index, entries={name: e for name, e in index.entries.items() if name != f"{module}.weight"})
    coding = coding_of(quantization, plain, module)
    others = {"scales": (f"{module}.weight_scale", required(index, module, "weight_scale", "weight"))}
    if not coding.symmetric:
        others["zeros"] = (f"{module}.weight_zero_point", required(index, module, "weight_zero_point", *PARTS))
    others |= _order(index, module, coding)
    return scaled_matrix(module, codes, others, replace(coding, bits=8), _why(coding))


def _words(index: Index, module: str, coding: Coding) -> CompressedMatrix:
    codes, scales, shape = (required(index, module, f"weight_{part}", *PARTS) for part in ("packed", "scale", "shape"))
    pack, name, why = 32 // coding.bits, f"{module}.weight", _why(coding)
    if len(codes.shape) != 2 or coding.number == "float" or coding.rows > 1:
        refuse(codes, f"{name}_packed", f"has shape {codes.shape} and {why} is not packed so")
    matrix = codes.shape[0], codes.shape[1] * pack
    check(f"{name}_packed", codes, [torch.int32], codes.shape, why)
    check(f"{name}_scale", scales, SCALES, scales.shape, why)
    check(f"{name}_shape", shape, [torch.int64, torch.int32], (2,), why)
    planes = {
        "codes": Plane(f"{name}_packed", (0, 1), (1, pack)),
        "scales": plane_of(f"{name}_scale", scales, matrix, coding, why),
        "shape": Plane(f"{name}_shape", (ALL,), (2,)),
    }
    group = coding.group or max(1, matrix[1])
    if not coding.symmetric:
        zeros = required(index, module, "weight_zero_point", *PARTS)
        groups = -(-matrix[1] // group)
        check(f"{name}_zero_point", zeros, [torch.int32], (-(-matrix[0] // pack), groups), why)
        along = (ALL, groups) if coding.scattered else (1, group)
        planes["zeros"] = Plane(f"{name}_zero_point", (0, along[0]), (pack, along[1]))
    for role, (part, entry) in _order(index, module, coding).items():
        check(part, entry, [torch.int32, torch.int64], matrix[1:], why)
        planes[role] = Plane(part, (1,), (1,))
    unit = 1, column_unit(pack, matrix[1] if coding.scattered else group, matrix[1])
    return CompressedMatrix(name, matrix, scheme_of(coding, group), coding, planes, unit)


def _order(index: Index, module: str, coding: Coding) -> dict[str, tuple[str, TensorEntry]]:
    """The plane of the columns' groups, where the file has it or needs it."""
    name = f"{module}.weight_g_idx"
    if coding.scattered:
        return {"groups": (name, required(index, module, "weight_g_idx", *PARTS))}
    return {"groups": (name, index.entries[name])} if name in index.entries else {}


def _why(coding: Coding) -> str:
    kind = "FP8" if coding.number == "float" else f"int{coding.bits}"
    return f"{kind} with a scale for {coding.rows or 'all'} rows and {coding.group or 'all'} columns"
