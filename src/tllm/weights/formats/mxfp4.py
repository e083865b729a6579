"""MXFP4 experts as gpt-oss has them (OCP Microscaling Formats 1.0): 4-bit floating-point numbers, 32 of which share a
power of two.

`gate_up_proj_blocks` uint8 [experts, 2 * width, hidden / 32, 16] and `gate_up_proj_scales` uint8 [experts, 2 * width,
hidden / 32]; `down_proj_*` likewise [experts, hidden, width / 32, …]. Byte j of a block has element 2 j in its low half
and 2 j + 1 in its high half. Row 2 i belongs to gate and 2 i + 1 to up.

A model has each expert's matrices in few bits, by names that are no tensors of the files
(`spec.quantized.weight_form.expert_matrix`). Or it has the stacks as plain files have them: `experts.gate_up_proj`
[experts, inputs, 2 * width], `down_proj` [experts, width, hidden]; these are decoded to plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tllm.quantization.blocks import MXFP4, Blocks
from tllm.quantization.stored_tensor import Box, StoredTensor
from tllm.spec.quantized.weight_bits import Quantization
from tllm.spec.quantized.weight_form import expert_matrix
from tllm.weights.boxes import Shape
from tllm.weights.formats.matrix_planes import SCALES, check, modules_with, refuse, required, unpacked
from tllm.weights.formats.scaled_matrix import finite_exponents
from tllm.weights.formats.stacked_experts import with_stack
from tllm.weights.safetensors_header import TensorEntry
from tllm.weights.safetensors_index import Index

GROUP = 32
STACKS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class ExpertMatrix:
    """One expert's matrix of a stack, with the files' rows. The planes are seen as [experts, rows, groups, …]."""

    name: str
    shape: Shape
    blocks: str
    scales: str
    expert: int

    scheme = MXFP4

    def aligned(self, box: Box) -> Box:
        rows, (start, stop) = box
        return rows, (start // GROUP * GROUP, min(self.shape[1], -(-stop // GROUP) * GROUP))

    def plane_boxes(self, box: Box) -> dict[str, Box]:
        rows, (start, stop) = box
        here = (self.expert, self.expert + 1), rows, (start // GROUP, -(-stop // GROUP))
        return {self.blocks: (*here, (0, GROUP // 2)), self.scales: here}

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Blocks:
        scales = planes[self.scales][0]
        finite_exponents(self.name, scales)
        return Blocks(MXFP4, unpacked(planes[self.blocks][0], 4).flatten(1), scales)


def read_mxfp4(index: Index, quantization: Quantization) -> Index:
    """The index with the stacks of experts, and with each expert's matrices."""
    entries, stored = dict(index.entries), dict[str, StoredTensor]()
    for module in modules_with(index, [f"{stack}_{part}" for stack in STACKS for part in ("blocks", "scales")]):
        for stack in STACKS:
            name = f"{module}.{stack}"
            blocks, scales = _planes(index, module, stack)
            entries |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            experts, rows, groups = scales.shape
            if f"{name}_bias" in index.entries:
                check(f"{name}_bias", index.entries[f"{name}_bias"], SCALES, (experts, rows), "MXFP4")
            shape = rows, groups * GROUP
            stored |= with_stack(
                name,
                [
                    ExpertMatrix(expert_matrix(name, expert), shape, f"{name}_blocks", f"{name}_scales", expert)
                    for expert in range(experts)
                ],
            )
    return Index(entries, {**index.stored, **stored})


def _planes(index: Index, module: str, stack: str) -> tuple[TensorEntry, TensorEntry]:
    """The two planes of a stack: blocks [experts, rows, groups, 16], however the file shapes them, and scales."""
    others = [f"{stack}_blocks", f"{stack}_scales"]
    blocks, scales = (required(index, module, part, *others) for part in others)
    names, why = [f"{module}.{part}" for part in others], "MXFP4 in groups of 32"
    shape = scales.shape
    if len(shape) != 3 or not all(shape) or (stack == STACKS[0] and shape[1] % 2):
        rows = "as many rows of gate as of up" if stack == STACKS[0] else "rows"
        refuse(scales, names[1], f"has shape {shape} and {why} needs [experts, rows, groups] with {rows}")
    experts, rows_of_expert, groups = shape
    given = (experts, rows_of_expert, groups * GROUP // 2) if len(blocks.shape) == 3 else (*shape, GROUP // 2)
    check(names[0], blocks, [torch.uint8], given, why)
    check(names[1], scales, [torch.uint8], shape, why)
    return replace(blocks, shape=(*shape, GROUP // 2)), scales
