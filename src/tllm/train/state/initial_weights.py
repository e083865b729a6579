"""Random weights to begin with: each number hangs on the seed and its tensor's name, never on the layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tllm.model.transformer import build
from tllm.parallel.mesh import whole
from tllm.parallel.shard import shard_of
from tllm.spec.model_spec import ModelSpec
from tllm.train.data.seeds import key_for
from tllm.weights.boxes import Shape
from tllm.weights.boxes import whole as whole_box

STD = 0.02
"""Where the model's config gives no `initializer_range`."""


def shapes_of(spec: ModelSpec) -> dict[str, Shape]:
    """The shape of every tensor of the uncut model, by the checkpoint's name."""
    shapes: dict[str, Shape] = {}
    for parameter in build(spec, whole(spec), torch.float32, "meta").parameters():
        for piece in shard_of(parameter).pieces:
            box = piece.source or whole_box(tuple(parameter.shape))
            known = shapes.get(piece.name, (0,) * len(box))
            shapes[piece.name] = tuple(max(stop, width) for (_, stop), width in zip(box, known, strict=True))
    return shapes


@torch.no_grad()
def fill_randomly(parameters: Iterable[nn.Parameter], spec: ModelSpec, seed: int, std: float = STD) -> None:
    """Matrices are drawn from N(0, std²), scales of norms are 1 and biases 0, as transformers begins a model."""
    shapes = shapes_of(spec)
    for parameter in parameters:
        for piece in shard_of(parameter).pieces:
            target = parameter[tuple(slice(a, b) for a, b in piece.target)]
            tensor = _drawn(piece.name, shapes[piece.name], spec, seed, std)
            part = tensor[tuple(slice(a, b) for a, b in piece.source)]
            target.copy_(part.reshape(target.shape))


def _drawn(name: str, shape: Shape, spec: ModelSpec, seed: int, std: float) -> Tensor:
    if len(shape) > 1:
        dice = torch.Generator().manual_seed(key_for("weights", seed, name) >> 1)
        return torch.empty(shape).normal_(std=std, generator=dice)
    is_scale = name.endswith("norm.weight")
    return torch.full(shape, float(is_scale and not spec.norm_offset))
