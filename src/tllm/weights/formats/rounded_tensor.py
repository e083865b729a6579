"""Plain weights of the files that are rounded to few bits while they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tllm.core.errors import ConfigError, WeightsError
from tllm.quantization.blocks import Blocks, Scheme
from tllm.quantization.round_weights import GROUP, SCHEMES, round_weights
from tllm.quantization.stored_tensor import Box, StoredTensor
from tllm.spec.families import spec_from_config
from tllm.spec.quantized.weight_form import QUANTIZE, Quantize, rounding_of
from tllm.weights.formats.stacked_experts import with_stack
from tllm.weights.safetensors_index import Index


@dataclass(frozen=True)
class RoundedTensor:
    """A matrix of plain numbers, read by whole groups of columns, so that every cut of it rounds alike."""

    name: str
    shape: tuple[int, ...]
    kind: Quantize

    @property
    def scheme(self) -> Scheme:
        return SCHEMES[self.kind]

    def aligned(self, box: Box) -> Box:
        rows, (start, stop) = box
        return rows, (start // GROUP * GROUP, min(-(-stop // GROUP) * GROUP, self.shape[1]))

    def plane_boxes(self, box: Box) -> dict[str, Box]:
        return {self.name: box}

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Blocks:
        return round_weights(_numbers(self.name, planes), self.kind)


@dataclass(frozen=True)
class RoundedExpert(RoundedTensor):
    """One expert's matrix [outputs, inputs] of a stack of plain numbers, [experts, inputs, outputs], read likewise."""

    expert: int

    def plane_boxes(self, box: Box) -> dict[str, Box]:
        outputs, inputs = box
        return {self.name: ((self.expert, self.expert + 1), inputs, outputs)}

    def decode(self, box: Box, planes: Mapping[str, Tensor]) -> Blocks:
        return round_weights(_numbers(self.name, planes)[0].t(), self.kind)


def _numbers(name: str, planes: Mapping[str, Tensor]) -> Tensor:
    """What was read, all of it finite: a code would hide a weight that is no number."""
    weights = planes[name]
    # By their ends, as a tensor of their size takes longer than to round them; of no weights there are none.
    ends = torch.aminmax(weights) if weights.numel() else ()
    if not all(math.isfinite(one.item()) for one in ends):
        raise WeightsError(f"{name}: a weight is not a finite number", "the file is damaged; copy it again")
    return weights


def rounded_tensors(index: Index, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The weights of the files that are to be rounded. ConfigError where they have few bits already."""
    if not config.get(QUANTIZE):
        return {}
    # Files may have a head beside a table that takes its place, which is then not read.
    tied = "lm_head.weight" not in index.entries or ("model_type" in config and spec_from_config(dict(config)).tied)
    kinds = {name: kind for name in index.entries if (kind := rounding_of(name, config, tied)) is not None}
    if index.stored and kinds:
        raise ConfigError(
            "--quantize rounds plain weights, and those of this model have few bits already", "leave --quantize out"
        )
    found = dict[str, StoredTensor]()
    for name, kind in kinds.items():
        shape = index.entries[name].shape
        if len(shape) != 3 or not all(shape):
            found[name] = RoundedTensor(name, shape, kind)
            continue
        experts, inputs, outputs = shape
        found |= with_stack(name, [RoundedExpert(name, (outputs, inputs), kind, expert) for expert in range(experts)])
    return found
