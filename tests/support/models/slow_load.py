"""The obvious loader: read every tensor whole and copy each piece to its place. The fast loader is compared with it."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from tllm.parallel.shard import Ranges, shard_of


def slow_load(model: nn.Module, folder: Path) -> None:
    """Fill every parameter of `model` from the folder's safetensors files."""
    tensors = text_tensors_of(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            for piece in shard_of(parameter).pieces:
                source = tensors[piece.name][slices(piece.source)]
                target = parameter[slices(piece.target)]
                target.copy_(source.reshape(target.shape))


def text_tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder as a text model's checkpoint names it, without what a multimodal one has beside."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    plain = {re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name): x for name, x in tensors.items()}
    plain = {name.replace("model.lm_head.", "lm_head."): x for name, x in plain.items()}
    return {name: x for name, x in plain.items() if re.match(r"(model\.(embed_tokens|layers|norm)|lm_head)\.", name)}


def slices(ranges: Ranges) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in ranges) or (slice(None),)
