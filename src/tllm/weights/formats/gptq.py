"""GPTQ folders (2210.17323), 4 and 8 bits, as AutoGPTQ and GPTQModel write them, in both of their versions.

`qweight` int32 [inputs / pack, outputs], the lowest bits first; `qzeros` int32 [groups, outputs / pack]; `scales`
[groups, outputs]; `g_idx` int32 [inputs], the group of each input. A weight is (code - zero) * scale. Files of
version 1 keep each zero less one, modulo 2^bits.

With `desc_act` the inputs of a group lie anywhere, so that a cut of the inputs needs the scales of all groups. Such a
weight is decoded to plain numbers.
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
    required,
    unpacked,
)
from tllm.weights.formats.module_codings import coding_of, scheme_of
from tllm.weights.safetensors_index import Index

PARTS = ("qweight", "qzeros", "scales")


class GptqMatrix(PackedMatrix):
    """The planes of one linear."""

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Blocks | Tensor:
        bits = self.coding.bits
        pack, middle = 32 // bits, 1 << (bits - 1)
        codes = part_of(unpacked(self.tensor("codes", planes).t(), bits), box, 1, pack)
        stored = part_of(unpacked(self.tensor("zeros", planes), bits), box, 0, pack).t()
        zeros = ((stored.int() + self.coding.zero_offset) % (1 << bits)).to(torch.uint8)
        scales = self.scales(planes).t().contiguous()
        if self.coding.symmetric and bool((zeros != middle).any()):
            raise WeightsError(
                f"{self.name}: zeros are {int(zeros.min())} to {int(zeros.max())} and a symmetric one is {middle}",
                "quantization_config has another checkpoint_format (gptq, gptq_v2) or sym than the files",
            )
        if self.scheme is None:
            groups = self.tensor("groups", planes)
            return of_scattered(self.name, codes.float(), zeros.float(), scales, groups)
        if "groups" in self.planes:
            check_columns_of_groups(self.name, self.tensor("groups", planes), box, self.scheme.group)
        return Blocks(
            self.scheme, codes.contiguous(), scales, zeros=None if self.coding.symmetric else zeros.contiguous()
        )


def read_gptq(index: Index, quantization: Quantization) -> Index:
    """The index with each quantised linear by its `.weight`."""
    stored: dict[str, StoredTensor] = {}
    for module in modules_with(index, (*PARTS, "g_idx")):
        stored[f"{module}.weight"] = _matrix(index, module, coding_of(quantization, index, module))
    return replace(index, stored={**index.stored, **stored})


def _matrix(index: Index, module: str, coding: Coding) -> GptqMatrix:
    codes, zeros, scales = (required(index, module, part, *PARTS, "g_idx") for part in PARTS)
    order = index.entries.get(f"{module}.g_idx")
    if coding.scattered and order is None:
        required(index, module, "g_idx", *PARTS)
    pack = 32 // coding.bits
    inputs = order.shape[0] if order is not None and order.shape else (codes.shape[0] if codes.shape else 0) * pack
    outputs = scales.shape[-1] if scales.shape else 0
    group = coding.group or max(1, inputs)
    groups = -(-inputs // group)
    why = f"GPTQ of {coding.bits} bits with {inputs} inputs in groups of {group} and {outputs} outputs"
    check(f"{module}.qweight", codes, [torch.int32], (-(-inputs // pack), outputs), why)
    check(f"{module}.qzeros", zeros, [torch.int32], (groups, -(-outputs // pack)), why)
    check(f"{module}.scales", scales, SCALES, (groups, outputs), why)
    along = (ALL, groups) if coding.scattered else (1, group)
    planes = {
        "codes": Plane(f"{module}.qweight", (1, 0), (pack, 1)),
        "zeros": Plane(f"{module}.qzeros", (along[0], 0), (along[1], pack)),
        "scales": Plane(f"{module}.scales", (along[0], 0), (along[1], 1)),
    }
    if order is not None:
        check(f"{module}.g_idx", order, [torch.int32, torch.int64], (inputs,), why)
        planes["groups"] = Plane(f"{module}.g_idx", (1,), (1,))
    unit = 1, column_unit(pack, inputs if coding.scattered else group, inputs)
    return GptqMatrix(f"{module}.weight", (outputs, inputs), scheme_of(coding, group), coding, planes, unit)
