"""The obvious loader: read every tensor whole and copy each piece to its place. The fast loader is compared with it."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from tllm.parallel.shard import Ranges, shard_of
from tllm.weights.boxes import whole
from tllm.weights.load import held_of
from tllm.weights.safetensors_index import Index


def slow_load(model: nn.Module, folder: Path) -> None:
    """Fill every parameter of `model` from the folder's safetensors files."""
    tensors = text_tensors_of(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            for piece in shard_of(parameter).pieces:
                source = tensors[piece.name][slices(piece.source)]
                target = parameter[slices(piece.target)]
                target.copy_(source.reshape(target.shape))


def names_read(model: nn.Module, index: Index) -> set[str]:
    """The tensors of the files that a model reads."""
    held = [(block.name, block.box or whole(index.shape(block.name))) for block in held_of(model)]
    return {name for block in held for name in index.planes(*block)}


def text_tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder as a text model's checkpoint names it, without what a multimodal one has beside."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    plain = {re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name): x for name, x in tensors.items()}
    plain = {name.replace("model.lm_head.", "lm_head."): x for name, x in plain.items()}
    plain = {
        name: x
        for name, x in plain.items()
        if re.match(r"(model\.(embed_tokens\w*|per_layer_\w+|layers|norm)|lm_head)\.", name)
    }
    return _with_experts_apart(plain)


def _with_experts_apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gemma4's experts lie in one tensor of a layer, [experts, rows, columns], each expert's gate above its up."""
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(model\.layers\.\d+\.experts)\.(gate_up|down)_proj", name)
        if match is None:
            apart[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            half = len(expert) // 2
            parts = {"down": expert} if match[2] == "down" else {"gate": expert[:half], "up": expert[half:]}
            apart.update({f"{match[1]}.{number}.{part}_proj.weight": rows for part, rows in parts.items()})
    return apart


def slices(ranges: Ranges) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in ranges) or (slice(None),)
