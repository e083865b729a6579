"""The obvious loader: read every tensor whole and copy each piece to its place. The fast loader is compared with it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from tllm.parallel.shard import Ranges, shard_of


def slow_load(model: nn.Module, folder: Path) -> None:
    """Fill every parameter of `model` from the folder's safetensors files."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    with torch.no_grad():
        for parameter in model.parameters():
            for piece in shard_of(parameter).pieces:
                source = tensors[piece.name][slices(piece.source)]
                target = parameter[slices(piece.target)]
                target.copy_(source.reshape(target.shape))


def slices(ranges: Ranges) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in ranges) or (slice(None),)
