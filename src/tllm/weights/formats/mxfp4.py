"""MXFP4 experts as gpt-oss has them (OCP Microscaling Formats 1.0): 4-bit floating-point numbers, 32 of which share a
power of two.

`gate_up_proj_blocks` uint8 [experts, 2 * width, hidden / 32, 16] and `gate_up_proj_scales` uint8 [experts, 2 * width,
hidden / 32]; `down_proj_*` likewise [experts, hidden, width / 32, …]. Byte j of a block has element 2 j in its low half
and 2 j + 1 in its high half. Row 2 i belongs to gate and 2 i + 1 to up; so do the numbers of `gate_up_proj_bias`.

A model may have each expert's matrices by names of their own, in few bits: `experts.3.gate_proj.weight`, `up_proj`,
`down_proj`, and `.bias`. Or it has the stacks as plain files have them: `experts.gate_up_proj` [experts, inputs, 2 *
width], `down_proj` [experts, width, hidden]; these are decoded to plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tllm.quantization.blocks import MXFP4, Blocks, dequantize
from tllm.quantization.stored_tensor import Box, StoredTensor
from tllm.spec.quantized.weight_bits import Quantization
from tllm.weights.boxes import Shape
from tllm.weights.formats.matrix_planes import SCALES, check, modules_with, refuse, required, unpacked
from tllm.weights.formats.scaled_matrix import powers
from tllm.weights.safetensors_header import TensorEntry
from tllm.weights.safetensors_index import Index

GROUP = 32
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The files' name of a stack of matrices -> the model's, whose rows take turns."""


@dataclass(frozen=True)
class ExpertMatrix:
    """One matrix of one expert. The planes are seen as [experts, rows, turns, groups, …]."""

    name: str
    shape: Shape
    blocks: str
    scales: str
    expert: int
    turn: int

    scheme = MXFP4

    def aligned(self, box: Box) -> Box:
        rows, (start, stop) = box
        return rows, (start // GROUP * GROUP, min(self.shape[1], -(-stop // GROUP) * GROUP))

    def plane_boxes(self, box: Box) -> dict[str, Box]:
        rows, (start, stop) = box
        here = ((self.expert, self.expert + 1), rows, (self.turn, self.turn + 1), (start // GROUP, -(-stop // GROUP)))
        return {self.blocks: (*here, (0, GROUP // 2)), self.scales: here}

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Blocks:
        codes = unpacked(planes[self.blocks][0, :, 0], 4).flatten(1)
        scales = powers(self.name, planes[self.scales][0, :, 0]) / 2
        # A power of two is exact in bfloat16, which has all exponents of float32.
        return Blocks(MXFP4, codes, scales.to(torch.bfloat16))


@dataclass(frozen=True)
class ExpertBias:
    """The bias of one matrix of one expert, in plain numbers: each of the `turns`-th of a row of the plane."""

    shape: Shape
    biases: str
    expert: int
    turn: int
    turns: int

    scheme = None

    def aligned(self, box: Box) -> Box:
        return box

    def plane_boxes(self, box: Box) -> dict[str, Box]:
        start, stop = box[0]
        return {self.biases: ((self.expert, self.expert + 1), (start * self.turns, stop * self.turns))}

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Tensor:
        return planes[self.biases][0, self.turn :: self.turns]


@dataclass(frozen=True)
class ExpertStack:
    """A stack of matrices in plain numbers, [experts, inputs, outputs], the outputs in the order of the files' rows."""

    name: str
    shape: Shape
    blocks: str
    scales: str
    turns: int

    scheme = None

    def aligned(self, box: Box) -> Box:
        experts, (start, stop), outputs = box
        return experts, (start // GROUP * GROUP, min(self.shape[1], -(-stop // GROUP) * GROUP)), outputs

    def plane_boxes(self, box: Box) -> dict[str, Box]:
        experts, (start, stop), (first, last) = box
        rows = first // self.turns, -(-last // self.turns)
        here = (experts, rows, (0, self.turns), (start // GROUP, -(-stop // GROUP)))
        return {self.blocks: (*here, (0, GROUP // 2)), self.scales: here}

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Tensor:
        first, last = box[2]
        codes = unpacked(planes[self.blocks].flatten(1, 2), 4).flatten(2)
        scales = powers(self.name, planes[self.scales].flatten(1, 2)) / 2
        rows = dequantize(Blocks(MXFP4, codes, scales)).narrow(1, first % self.turns, last - first)
        return rows.transpose(1, 2)


def read_mxfp4(index: Index, quantization: Quantization) -> Index:
    """The index with the stacks of experts, and each expert's matrices and biases by their own names."""
    entries, stored = dict(index.entries), dict[str, StoredTensor]()
    ends = [f"{stack}_{part}" for stack in PROJECTIONS for part in ("blocks", "scales")]
    for module in modules_with(index, ends):
        for stack, projections in PROJECTIONS.items():
            blocks, scales = f"{module}.{stack}_blocks", f"{module}.{stack}_scales"
            seen = _as_turns(index, module, stack, len(projections))
            entries |= seen
            experts, rows, _, groups, *_ = seen[blocks].shape
            biases = f"{module}.{stack}_bias"
            if biases in index.entries:
                wanted = experts, rows * len(projections)
                check(biases, index.entries[biases], SCALES, wanted, "MXFP4")
            name, shape = f"{module}.{stack}", (experts, groups * GROUP, rows * len(projections))
            stored[name] = ExpertStack(name, shape, blocks, scales, len(projections))
            for turn, projection in enumerate(projections):
                for expert in range(experts):
                    name = f"{module}.{expert}.{projection}"
                    stored[f"{name}.weight"] = ExpertMatrix(
                        f"{name}.weight", (rows, groups * GROUP), blocks, scales, expert, turn
                    )
                    if biases in index.entries:
                        stored[f"{name}.bias"] = ExpertBias((rows,), biases, expert, turn, len(projections))
    return Index(entries, {**index.stored, **stored})


def _as_turns(index: Index, module: str, stack: str, turns: int) -> dict[str, TensorEntry]:
    """The two planes of a stack, with the rows of one matrix apart from those of the other."""
    others = [f"{stack}_blocks", f"{stack}_scales"]
    blocks, scales = (required(index, module, part, *others) for part in others)
    names, why = [f"{module}.{part}" for part in others], "MXFP4 in groups of 32"
    shape = scales.shape
    if len(shape) != 3 or shape[1] % turns:
        refuse(
            scales, names[1], f"has shape {shape} and {why} needs [experts, rows, groups] with rows in {turns} parts"
        )
    experts, rows, groups = shape
    given = (experts, rows, groups * GROUP // 2) if len(blocks.shape) == 3 else (*shape, GROUP // 2)
    check(names[0], blocks, [torch.uint8], given, why)
    check(names[1], scales, [torch.uint8], shape, why)
    seen = experts, rows // turns, turns, groups
    return {names[0]: replace(blocks, shape=(*seen, GROUP // 2)), names[1]: replace(scales, shape=seen)}
