"""AWQ folders (2306.00978) as AutoAWQ's "gemm" version writes them: 4 bits, a scale and a zero for each group.

`qweight` int32 [inputs, outputs / 8], `qzeros` int32 [groups, outputs / 8], `scales` [groups, outputs]; a weight is
(code - zero) * scale. Output 8 b + j is in the nibble NIBBLES[j], counted from the lowest, of word b.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tllm.quantization.blocks import Blocks, Scheme
from tllm.quantization.stored_tensor import Box, StoredTensor
from tllm.spec.quantized.weight_bits import Coding, Quantization
from tllm.weights.formats.matrix_planes import (
    SCALES,
    PackedMatrix,
    Plane,
    check,
    column_unit,
    modules_with,
    required,
)
from tllm.weights.formats.module_codings import coding_of
from tllm.weights.safetensors_index import Index

NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
PACK = 8
"""Outputs in a word."""
PARTS = ("qweight", "qzeros", "scales")


class AwqMatrix(PackedMatrix):
    """The planes of one linear."""

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Blocks:
        assert self.scheme is not None
        start, stop = box[0]
        codes, zeros = (
            _outputs_first(self.tensor(role, planes)).narrow(0, start % PACK, stop - start)
            for role in ("codes", "zeros")
        )
        return Blocks(self.scheme, codes, self.scales(planes).t().contiguous(), zeros=zeros)


def read_awq(index: Index, quantization: Quantization) -> Index:
    """The index with each quantised linear by its `.weight`."""
    stored: dict[str, StoredTensor] = {}
    for module in modules_with(index, PARTS):
        stored[f"{module}.weight"] = _matrix(index, module, coding_of(quantization, index, module))
    return replace(index, stored={**index.stored, **stored})


def _matrix(index: Index, module: str, coding: Coding) -> AwqMatrix:
    codes, zeros, scales = (required(index, module, part, *PARTS) for part in PARTS)
    inputs, outputs = codes.shape[0] if codes.shape else 0, scales.shape[-1] if scales.shape else 0
    group = coding.group or max(1, inputs)
    groups, words = -(-inputs // group), -(-outputs // PACK)
    why = f"AWQ with {inputs} inputs in groups of {group} and {outputs} outputs"
    check(f"{module}.qweight", codes, [torch.int32], (inputs, words), why)
    check(f"{module}.qzeros", zeros, [torch.int32], (groups, words), why)
    check(f"{module}.scales", scales, SCALES, (groups, outputs), why)
    planes = {
        "codes": Plane(f"{module}.qweight", (1, 0), (1, PACK)),
        "zeros": Plane(f"{module}.qzeros", (1, 0), (group, PACK)),
        "scales": Plane(f"{module}.scales", (1, 0), (group, 1)),
    }
    unit = PACK, column_unit(1, group, inputs)
    return AwqMatrix(f"{module}.weight", (outputs, inputs), Scheme(4, group), coding, planes, unit)


def _outputs_first(words: Tensor) -> Tensor:
    """The codes of words [rows, words], the outputs in order: [8 * words, rows]."""
    turned = words.t().contiguous()
    codes = torch.empty(turned.shape[0], PACK, turned.shape[1], dtype=torch.uint8)
    for place, nibble in enumerate(NIBBLES):
        codes[:, place] = (turned >> 4 * nibble) & 15
    return codes.flatten(0, 1)
