"""Experts that a family's readers look for in one tensor of a layer, put together again when a folder is written."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tllm.weights.boxes import Shape

ONLY_STACKED = ("gemma4_text",)
"""Families whose experts other programs read in stacks alone; those of others are read apart too."""

EXPERT = re.compile(r"(?P<block>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight$")


class WholeTensor(Protocol):
    """A tensor of the checkpoint that can be made when it is written."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def make(self) -> Tensor: ...


class _Stack(NamedTuple):
    """[experts, rows, columns]; the rows of an expert are those of its `parts` tensors, one above another."""

    name: str
    parts: int
    tensors: list[WholeTensor]

    @property
    def shape(self) -> Shape:
        rows, columns = self.tensors[0].shape
        return len(self.tensors) // self.parts, self.parts * rows, columns

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def make(self) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype)
        for place, tensor in zip(out.flatten(0, 1).chunk(len(self.tensors)), self.tensors, strict=True):
            place.copy_(tensor.make())
        return out


def with_experts_stacked(tensors: Iterable[WholeTensor], config: Mapping[str, Any]) -> list[WholeTensor]:
    """The tensors of a folder, with stacks in the place of each expert's, for a family whose folders have them so.

    It undoes `with_experts_apart`: gates lie above ups in `experts.gate_up_proj`.
    """
    if config.get("model_type") not in ONLY_STACKED:
        return list(tensors)
    others: list[WholeTensor] = []
    stacks: dict[str, dict[tuple[int, int], WholeTensor]] = defaultdict(dict)
    for tensor in tensors:
        match = EXPERT.fullmatch(tensor.name)
        if match is None:
            others.append(tensor)
            continue
        name = f"{match['block']}.{'down' if match['part'] == 'down' else 'gate_up'}_proj"
        stacks[name][int(match["expert"]), match["part"] == "up"] = tensor
    for name, found in stacks.items():
        ordered = [found[key] for key in sorted(found)]
        others.append(_Stack(name, 1 if name.endswith(".down_proj") else 2, ordered))
    return others
