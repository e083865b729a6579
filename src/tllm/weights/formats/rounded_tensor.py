"""`RoundedTensor`: a plain weight of the files that is rounded to few bits while it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tllm.core.errors import ConfigError
from tllm.quantization.blocks import Blocks, Scheme
from tllm.quantization.round_weights import GROUP, SCHEMES, round_weights
from tllm.quantization.stored_tensor import Box, StoredTensor
from tllm.spec.quantized.weight_form import Quantize, rounding_of
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
        return round_weights(planes[self.name], self.kind)


def rounded_tensors(index: Index, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The weights of the files that are to be rounded. ConfigError where they have few bits already."""
    tied = "lm_head.weight" not in index.entries
    kinds = {name: kind for name in index.entries if (kind := rounding_of(name, config, tied)) is not None}
    if index.stored and kinds:
        raise ConfigError(
            "--quantize rounds plain weights, and those of this model have few bits already", "leave --quantize out"
        )
    return {name: RoundedTensor(name, index.entries[name].shape, kind) for name, kind in kinds.items()}
