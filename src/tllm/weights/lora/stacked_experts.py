"""Adapters whose experts PEFT has stacked (`target_parameters`), taken apart into the modules of each expert, and
stacked again where a model's own files have its experts so.

Since `transformers` holds the experts of a layer as two tensors, gate and up as one and down as the other, PEFT adapts
these: A [experts x rank, inputs] has those of one expert after another, and B [outputs, rank x experts] has the experts
of each row of A side by side. Files of models have tensors of each expert, and so has an adapter of theirs here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from tllm.core.errors import UNREADABLE, WeightsError
from tllm.parallel.lora.adapted_model import EXPERT
from tllm.parallel.lora.lora_update import tensor_names
from tllm.spec.lora.lora_config import CONFIG_FILE, CONFIG_LIMIT
from tllm.weights.boxes import Shape
from tllm.weights.byte_source import ByteSource
from tllm.weights.dtypes import memory
from tllm.weights.export import WholeTensor
from tllm.weights.lora.adapter_files import WEIGHTS_FILE, WRAPPED, module_name
from tllm.weights.safetensors_header import make_header, read_header, read_metadata
from tllm.weights.safetensors_index import Index

KEY = "target_parameters"

STACKED = re.compile(r"(model\.layers\.\d+)\.(?:[\w.]+\.)?experts(\.base_layer)?\.lora_([AB])\.weight")
"""A tensor of stacked experts: its layer, whether it is the inner one of two that are adapted, and which it is."""

TABLE = msgspec.json.Decoder(dict[str, Any])

BOTH, DOWN = "gate_up_proj", "down_proj"
NAMES = {BOTH: (BOTH, DOWN), "w1": ("w1", "w3", "w2"), "gate_proj": ("gate_proj", "up_proj", "down_proj")}
"""The gate, the up and the down of an expert, by the name of the first. Where the model's own files have them stacked,
gate and up are one here too."""


class _Experts(NamedTuple):
    """What names of a layer's experts begin with, how many there are, and what their products are called."""

    block: str
    experts: int
    into: tuple[str, ...]
    down: str


def taken_apart(source: ByteSource, shapes: Mapping[str, object]) -> dict[str, bytes] | None:
    """The files of an adapter with modules of each expert, or None where it has no stacked ones.

    `shapes` are the adaptable modules of the model by their names. WeightsError for what is not such an adapter.
    """
    raw = _config(source)
    wanted = raw.get(KEY)
    if not wanted or WEIGHTS_FILE not in source.names():
        return None
    parts = _parts(wanted)
    for key in ("rank_pattern", "alpha_pattern"):
        if raw.get(key):
            raise WeightsError(
                f"{CONFIG_FILE} has {KEY} and {key}, and one rank is read beside it", "merge it with PEFT"
            )
    index = Index(read_header(source, WEIGHTS_FILE))
    tensors: dict[str, Tensor] = {}
    for name in index.entries:
        found = STACKED.fullmatch(module_name(name))
        if found is None:
            tensors[name] = index.slice(source, name)
            continue
        part = parts[0] if found[2] or len(parts) == 1 else parts[1]
        tensors |= _of_experts(name, part, found[3], index.slice(source, name), _layer(found[1], shapes))
    named = raw.get("target_modules") or []
    if isinstance(named, list):
        named = [*named, *sorted({_end(name) for name in tensors})]
    config = {**raw, KEY: None, "target_modules": named}
    return {CONFIG_FILE: json.dumps(config).encode(), WEIGHTS_FILE: _file(tensors, read_metadata(source, WEIGHTS_FILE))}


def _config(source: ByteSource) -> dict[str, Any]:
    """The table of `adapter_config.json`; an empty one for what `read_adapter` will refuse."""
    if CONFIG_FILE not in source.names() or source.size(CONFIG_FILE) > CONFIG_LIMIT:
        return {}
    try:
        return TABLE.decode(source.read(CONFIG_FILE, 0, source.size(CONFIG_FILE)))
    except UNREADABLE:
        return {}


def _parts(wanted: object) -> list[str]:
    """Which of the two tensors of experts are adapted, the inner one of PEFT's first."""
    names = [str(name).rpartition(".")[2] for name in wanted] if isinstance(wanted, list) else []
    if not names or set(names) - {BOTH, DOWN}:
        raise WeightsError(f"{CONFIG_FILE} has {KEY} {str(wanted)[:200]}, and {BOTH} and {DOWN} of experts are read")
    return [part for part in (BOTH, DOWN) if part in names]


def _layer(layer: str, shapes: Mapping[str, object]) -> _Experts:
    """The experts of a layer, by the modules of the model."""
    found = [match for name in shapes if name.startswith(f"{layer}.") and (match := EXPERT.fullmatch(name))]
    called = next((names for first, names in NAMES.items() if any(match[3] == first for match in found)), None)
    if called is None:
        raise WeightsError(
            f"the adapter adapts experts of {layer}, and of this model no expert there can be adapted",
            "is the adapter of this model?",
        )
    return _Experts(found[0][1], len({match[2] for match in found}), called[:-1], called[-1])


def _of_experts(name: str, part: str, which: str, x: Tensor, layer: _Experts) -> dict[str, Tensor]:
    """The tensors of each expert that a stacked A or B is made of."""
    block, experts, into, down = layer
    across, both = (0 if which == "A" else 1), part == BOTH
    if x.dim() != 2 or not all(x.shape) or x.shape[across] % experts or (which == "B" and both and x.shape[0] % 2):
        raise WeightsError(f"{name} has shape {tuple(x.shape)}, which does not fit {experts} experts")
    found: dict[str, Tensor] = {}
    of_each = x.unflatten(0, (experts, -1)) if which == "A" else x.unflatten(1, (-1, experts)).permute(2, 0, 1)  # type: ignore[no-untyped-call]
    for expert, own in enumerate(of_each):
        halves = [own] * len(into) if which == "A" else own.chunk(len(into))
        for called, half in zip(into, halves, strict=True) if both else ((down, own),):
            names = tensor_names(f"{block}.{expert}.{called}")
            found[WRAPPED + names[across]] = half.contiguous()
    return found


@dataclass(frozen=True)
class StackedTensor:
    """A, or B, of all experts of a layer, made of those of each."""

    name: str
    parts: tuple[WholeTensor, ...]

    @property
    def shape(self) -> Shape:
        rows, columns = self.parts[0].shape
        return (len(self.parts) * rows, columns) if _is_a(self.name) else (rows, len(self.parts) * columns)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def make(self) -> Tensor:
        made = [part.make() for part in self.parts]
        return torch.cat(made) if _is_a(self.name) else torch.stack(made, dim=2).flatten(1)


def stacked(tensors: Iterable[WholeTensor], layers: int) -> tuple[list[WholeTensor], list[str]]:
    """The tensors of an adapter with those of experts as PEFT stacks them, and its `target_parameters`: ends of names
    where they are adapted in all `layers` of the model, else with each one's layer."""
    others, of_layers = list[WholeTensor](), dict[tuple[str, str, str], list[tuple[int, WholeTensor]]]()
    for tensor in tensors:
        module, _, kind = tensor.name.rpartition(".lora_")
        if found := EXPERT.fullmatch(module):
            of_layers.setdefault((found[1], found[3], kind), []).append((int(found[2]), tensor))
        else:
            others.append(tensor)
    parts = {part for _, part, _ in of_layers}
    for (block, part, kind), numbered in of_layers.items():
        inner = ".base_layer" if part == BOTH and DOWN in parts else ""
        parts_in_order = tuple(tensor for _, tensor in sorted(numbered, key=itemgetter(0)))
        others.append(StackedTensor(f"{block}{inner}.lora_{kind}", parts_in_order))
    blocks = {part: {block for block, of, _ in of_layers if of == part} for part in sorted(parts)}
    if all(len(found) == layers for found in blocks.values()):
        return others, [f"mlp.experts.{part}" for part in blocks]
    return others, [
        f"{block.removeprefix('model.')}.{part}" for part, found in blocks.items() for block in sorted(found)
    ]


def _is_a(name: str) -> bool:
    return name.endswith(".lora_A.weight")


def _end(name: str) -> str:
    """The end of the name of the module that a tensor of an adapter is of."""
    return name.rpartition(".lora_")[0].rpartition(".")[2]


def _file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    parts: Iterable[Tensor] = tensors.values()
    header = make_header(((name, x.dtype, tuple(x.shape)) for name, x in tensors.items()), metadata)
    return header + b"".join(bytes(memory(x)) for x in parts)
