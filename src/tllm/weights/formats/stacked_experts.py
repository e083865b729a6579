"""Experts that the files keep as one tensor of a layer, read as a tensor of each expert.

So qwen3_5_moe and gemma4 are published: `experts.gate_up_proj` [experts, rows, columns] has an expert's gate above its
up, `experts.down_proj` its down. An expert's rows lie together in the file, so that each is a tensor there by itself.
Where other programs read nothing but stacks, `weights.export` writes stacks again.

gpt_oss has stacks [experts, inputs, outputs] of plain numbers. Where files have matrices [outputs, inputs] of experts,
in few bits or turned, the stack is made of these: `MatrixStack`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tllm.core.errors import WeightsError
from tllm.quantization.blocks import plain_numbers
from tllm.quantization.stored_tensor import Box, StoredTensor
from tllm.spec.quantized.weight_form import expert_matrix
from tllm.weights.boxes import Shape
from tllm.weights.safetensors_header import TensorEntry
from tllm.weights.safetensors_index import Index

STACKING = ("qwen3_5_moe_text", "gemma4_text")
"""Families whose files may have experts so."""

PARTS = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}


def with_experts_apart(index: Index, config: Mapping[str, Any]) -> Index:
    """The index with a tensor of each expert in the place of stacks, for a family that has stacks."""
    if config.get("model_type") not in STACKING:
        return index
    entries: dict[str, TensorEntry] = {}
    for name, entry in index.entries.items():
        end = next((end for end in PARTS if name.endswith(end)), None)
        entries.update({name: entry} if end is None else dict(_experts(name.removesuffix(end), entry, PARTS[end])))
    return Index(entries, index.stored)


def _experts(block: str, entry: TensorEntry, parts: tuple[str, ...]) -> Iterator[tuple[str, TensorEntry]]:
    """Each expert's tensors, in the order in which they lie in the file."""
    if len(entry.shape) != 3 or entry.shape[1] % len(parts) or not all(entry.shape):
        raise WeightsError(
            f"{entry.file}: the experts of {block} have shape {entry.shape} and should be [experts, rows, columns] "
            f"with rows of {' and '.join(parts)}",
            "does config.json belong to these weights?",
        )
    experts, rows, columns = entry.shape
    shape = (rows // len(parts), columns)
    each, at = entry.nbytes // (experts * len(parts)), entry.start
    for expert in range(experts):
        for part in parts:
            found = TensorEntry(entry.file, entry.dtype, shape, at, at + each)
            yield f"{block}.experts.{expert}.{part}.weight", found
            at += each


@dataclass(frozen=True)
class MatrixStack:
    """[experts, inputs, outputs] in plain numbers, of matrices [outputs, inputs].

    The planes of all matrices are the same tensors of the files, whose first dim is the expert.
    """

    shape: Shape
    matrices: tuple[StoredTensor, ...]

    scheme = None

    def aligned(self, box: Box) -> Box:
        experts, inputs, outputs = box
        outputs, inputs = self.matrices[0].aligned((outputs, inputs))
        return experts, inputs, outputs

    def plane_boxes(self, box: Box) -> dict[str, Box]:
        experts, inputs, outputs = box
        planes = self.matrices[0].plane_boxes((outputs, inputs))
        return {name: (experts, *of_expert[1:]) for name, of_expert in planes.items()}

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Tensor:
        (first, last), inputs, outputs = box
        stack = []
        for expert in range(first, last):
            of_expert = {name: x[expert - first : expert - first + 1] for name, x in planes.items()}
            stack.append(plain_numbers(self.matrices[expert].decode((outputs, inputs), of_expert)).t())
        return torch.stack(stack)


def with_stack(name: str, matrices: list[StoredTensor]) -> dict[str, StoredTensor]:
    """Weights of an index: each expert's matrix [outputs, inputs], and the stack of them by its own name."""
    outputs, inputs = matrices[0].shape
    stack: StoredTensor = MatrixStack((len(matrices), inputs, outputs), tuple(matrices))
    return {name: stack} | {expert_matrix(name, expert): matrix for expert, matrix in enumerate(matrices)}
