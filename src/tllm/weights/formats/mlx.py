"""MLX folders, affine: `weight` uint32 [outputs, inputs * bits / 32], the lowest bits first, with `scales` and `biases`
[outputs, groups]. A weight is code * scale + bias. Embeddings are kept so too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tllm.core.errors import WeightsError
from tllm.quantization.blocks import Blocks, Scheme
from tllm.quantization.stored_tensor import Box, StoredTensor
from tllm.spec.quantized.weight_bits import Coding, Quantization
from tllm.weights.formats.matrix_planes import (
    SCALES,
    PackedMatrix,
    Plane,
    check,
    column_unit,
    finite,
    modules_with,
    part_of,
    refuse,
    required,
    unpacked,
)
from tllm.weights.safetensors_index import Index

PARTS = ("weight", "scales", "biases")


class MlxMatrix(PackedMatrix):
    """The planes of one linear, or of a table."""

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Blocks:
        assert self.scheme is not None
        codes = part_of(unpacked(self.tensor("codes", planes), self.coding.bits), box, 1, 32 // self.coding.bits)
        biases = finite(self.name, self.tensor("minima", planes))
        return Blocks(self.scheme, codes.contiguous(), self.scales(planes), minima=-biases)


def read_mlx(index: Index, quantization: Quantization) -> Index:
    """The index with each quantised linear and table by its `.weight`."""
    stored: dict[str, StoredTensor] = {}
    packed = {name.removesuffix(".weight") for name, e in index.entries.items() if e.dtype == torch.uint32}
    for module in sorted({*modules_with(index, PARTS[1:]), *packed}):
        coding = quantization.coding(module)
        if coding is None:
            raise WeightsError(
                f"the files have {module!r} in few bits and the config does not say in how many",
                "does config.json belong to these weights?",
            )
        stored[f"{module}.weight"] = _matrix(index, module, coding)
    return replace(index, stored={**index.stored, **stored})


def _matrix(index: Index, module: str, coding: Coding) -> MlxMatrix:
    codes, scales, biases = (required(index, module, part, *PARTS) for part in PARTS)
    names = [f"{module}.{part}" for part in PARTS]
    if len(codes.shape) != 2:
        refuse(codes, names[0], f"has shape {codes.shape} and [outputs, words] are read")
    pack = 32 // coding.bits
    outputs, inputs = codes.shape[0], codes.shape[1] * pack
    group = coding.group or max(1, inputs)
    why = f"MLX of {coding.bits} bits with {inputs} inputs in groups of {group}"
    check(names[0], codes, [torch.uint32], codes.shape, why)
    grid = outputs, -(-inputs // group)
    check(names[1], scales, SCALES, grid, why)
    check(names[2], biases, SCALES, grid, why)
    planes = {
        "codes": Plane(names[0], (0, 1), (1, pack)),
        "scales": Plane(names[1], (0, 1), (1, group)),
        "minima": Plane(names[2], (0, 1), (1, group)),
    }
    unit = 1, column_unit(pack, group, inputs)
    scheme = Scheme(8 if coding.bits == 8 else 4, group)
    return MlxMatrix(names[0], (outputs, inputs), scheme, coding, planes, unit)
